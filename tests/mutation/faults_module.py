"""Faults of accelerated modules: what a call depends on, what it leaves on the tape."""

from __future__ import annotations

from fault import Fault

CALLS = ("module/test_calls.py", "module/test_modes.py")
TAPE = ("module/test_gradients.py",)
MODES = ("module/test_modes.py",)
WAITING = ("module/test_waiting.py",)
REASONS = ("module/test_reasons.py",)
HISTORIES = ("module/test_histories.py",)
SHARED = ("module/test_shared_results.py",)
GONE = ("module/test_flat_memory.py",)

MODULE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "module: calls with and without gradients share a graph", "module/states.py",
        "return self.flags(), mode, *batch.kind", "return self.flags(), mode.autocast, *batch.kind",
        MODES,
    ),
    Fault(
        "module: training and evaluation share a graph", "module/states.py",
        "return self.flags(), mode, *batch.kind", "return (), mode, *batch.kind", MODES,
    ),
    Fault(
        "module: a batch that a graph does not fit is run by it", "module/calls.py",
        "if call.fits(batch)), None)", "if True), None)", CALLS,
    ),
    Fault(
        "module: graphs of a state that is over are kept", "module/states.py",
        "            if state.guards.same(model):\n", "            if True:\n", HISTORIES,
    ),
    Fault(
        "module: eager is not said", "module/accelerate.py",
        "        if reason not in self._told:", "        if False:", CALLS,
    ),
    Fault(
        "module: eager is said each time", "module/accelerate.py",
        "            self._told.add(reason)\n", "", CALLS,
    ),
    Fault(
        "module: strict runs in eager", "module/accelerate.py",
        "                if self.options.strict:\n", "                if False:\n", MODES,
    ),
    Fault(
        "module: an argument's need of a gradient is no part of the kind", "module/arguments.py",
        "leaf.requires_grad))\n            continue", "False))\n            continue", TAPE,
    ),
    Fault(
        "module: a Python value is no part of the kind", "module/arguments.py",
        "            values.append(leaf_kind(leaf))", "            values.append(0)", CALLS,
    ),
    Fault(
        "module: the seed is the same each time", "module/run.py",
        "self._seed = call_seed()", "self._seed = torch.zeros(2, dtype=torch.int64)", MODES,
    ),
    Fault(
        "module: a call without dropout draws a number", "module/run.py",
        "if self._seed is None and call.draws:", "if self._seed is None:", MODES,
    ),
    Fault(
        "module: an output that has no cotangent gives gradients", "module/run.py",
        "reached = call.reached(given) - left", "reached = set(call.leaves) - left", TAPE,
    ),
    Fault(
        "module: a cotangent that was not expected is dropped", "module/run.py",
        "            if not given.keys() <= set(left.ends):\n", "            if False:\n", TAPE,
    ),
    Fault(
        "module: a forward is run again though it gives something else", "module/run.py",
        "if self._marks is None or self._read() != self._marks:", "if False:", WAITING,
    ),
    Fault(
        "module: only version counters tell that a forward gives something else", "module/run.py",
        "            if not given.equal(same.outputs()):\n", "            if False:\n", WAITING,
    ),
    Fault(
        "module: gradients of gradients are zero", "module/run.py",
        "        if torch.is_grad_enabled():\n", "        if False:\n", TAPE,
    ),
    Fault(
        "module: a checkpoint's second forward is not looked at", "module/run.py",
        "        left = left_in(content) or ctx.left\n", "        left = ctx.left\n", TAPE,
    ),
    Fault(
        "module: a checkpoint keeps the block", "module/run.py",
        "            content = content[:1]\n", "", TAPE,
    ),
    Fault(
        "module: whoever watches operators sees none", "module/around.py",
        "        or any(_watching())\n", "", MODES,
    ),
    Fault(
        "module: a field that was not computed is empty", "module/waiting.py",
        "            if field in self.absent:\n", "            if False:\n", WAITING,
    ),
    Fault(
        "module: fields that nobody reads are computed all the same", "module/prepared_call.py",
        "        if outputs != \"auto\" or not late:\n", "        if True:\n", WAITING,
    ),
    Fault(
        "module: nobody enters what is read", "module/waiting.py",
        "            self._read.add(self.fields[field])\n", "", WAITING,
    ),
    Fault(
        "module: a cache of generation is filled by the graph", "module/accelerate.py",
        "if reason is None and uses_cache(model, kwargs, self.takes_cache, self.cache_setting):",
        "if False:", WAITING,
    ),
    Fault(
        "module: a wrapper forgets what is set on it", "module/wrapper.py",
        "            setattr(self.module, name, value)", "            pass",
        ("module/test_wrapper.py", "module/test_wrapper_within.py"),
    ),
    Fault(
        "module: a batch that eager refuses is a reason for all others", "module/accelerate.py",
        "                found.keep()\n                return outputs",
        "                return outputs", REASONS,
    ),
    Fault(
        "module: one reason holds for all sizes", "module/calls.py",
        "len(self._refused) >= TRIES", "len(self._refused) >= 1", REASONS,
    ),
    Fault(
        "module: a number of each call's own is captured each time", "module/states.py",
        "        if len(others) >= VALUES:\n", "        if False:\n", REASONS,
    ),
    Fault(
        "module: an attribute that never rests is captured each time", "module/states.py",
        "if path is not None and self.met < OFTEN:", "if False:", REASONS,
    ),
    Fault(
        "module: an attribute that has come to rest runs in eager for ever", "module/states.py",
        "if path is not None and self.met < OFTEN:", "if path is not None:", REASONS,
    ),
    Fault(
        "module: graphs for sizes that share none are made without end", "module/states.py",
        "if calls is not None and len(calls) >= GRAPHS:", "if False:", REASONS,
    ),
    Fault(
        "module: what cannot be planned is no reason for eager", "module/accelerate.py",
        "except CaptureError as error:\n            reason = str(error)\n            if",
        "except KeyError as error:\n            reason = str(error)\n            if",
        REASONS,
    ),
    Fault(
        "module: a checkpoint's note leads to the gradients in its own block", "module/run.py",
        "            leave_in(content, None)\n", "            pass\n", GONE,
    ),
    Fault(
        "module: results that are views are copies", "capture/stages.py",
        "    result.tree.views = views\n", "    return\n", SHARED,
    ),
    Fault(
        "module: a view waits for a result that nobody has computed", "module/waiting.py",
        " and part.name not in at_once\n", "\n", SHARED,
    ),
    Fault(
        "module: outputs are held by a function that holds itself", "capture/output_tree.py",
        "        return _built(self.root, computed, given, held)\n",
        "        def again(part: Part) -> Any:\n"
        "            assert again\n"
        "            return _built(part, computed, given, held)\n\n"
        "        return again(self.root)\n", REASONS,
    ),
    Fault(
        "module: a block whose gradients were moved is lent again", "execute/blocks.py",
        "for block in back if block.is_in_place]", "for block in back]", REASONS,
    ),
    Fault(
        "module: launches stay bound to a block that was moved", "execute/blocks.py",
        "        if moved:\n", "        if False:\n", ("execute/test_blocks.py",),
    ),
    Fault(
        "module: a copy of a retained block is as large as the block", "execute/halves.py",
        "block.base[:n].copy_(source[:n])", "block.base[: source.numel()].copy_(source)", TAPE,
    ),
    Fault(
        "module: hooks on parameters are looked at anew at each call",
        "model_state/sweep.py",
        "        self._hooked = any(map(any, self._hooks))\n", "        self._hooked = False\n",
        REASONS,
    ),
)  # fmt: skip
