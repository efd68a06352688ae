"""Faults of accelerated modules: what a call depends on, what it leaves on the tape."""

from __future__ import annotations

from fault import Fault

CALLS = ("module/test_calls.py", "module/test_modes.py")
TAPE = ("module/test_gradients.py",)
MODES = ("module/test_modes.py",)
WAITING = ("module/test_waiting.py",)

MODULE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "module: calls with and without gradients share a graph", "module/accelerate.py",
        "key = (state.flags(), grad, batch.kind)", "key = (state.flags(), batch.kind)", MODES,
    ),
    Fault(
        "module: training and evaluation share a graph", "module/accelerate.py",
        "key = (state.flags(), grad, batch.kind)", "key = (grad, batch.kind)", MODES,
    ),
    Fault(
        "module: a batch that a graph does not fit is run by it", "module/accelerate.py",
        "                if call.fits(batch):\n", "                if True:\n", CALLS,
    ),
    Fault(
        "module: graphs of a state that is over are kept", "module/states.py",
        "            if state.guards.same(model):\n", "            if True:\n", MODES,
    ),
    Fault(
        "module: eager is not said", "module/accelerate.py",
        "        if reason not in self._told:\n", "        if False:\n", CALLS,
    ),
    Fault(
        "module: eager is said each time", "module/accelerate.py",
        "            self._told.add(reason)\n", "", CALLS,
    ),
    Fault(
        "module: strict runs in eager", "module/accelerate.py",
        "            if self.options.strict:\n                raise\n            return",
        "            return", MODES,
    ),
    Fault(
        "module: an argument's need of a gradient is no part of the kind", "module/arguments.py",
        "leaf.requires_grad))\n            continue", "False))\n            continue", TAPE,
    ),
    Fault(
        "module: a Python value is no part of the kind", "module/arguments.py",
        "            kinds.append(leaf_kind(leaf))", "            kinds.append(type(leaf))", CALLS,
    ),
    Fault(
        "module: the seed is the same each time", "module/accelerate.py",
        "seed = torch.randint(0, 2**32, (2,), dtype=torch.int64, device=\"cpu\")",
        "seed = torch.zeros(2, dtype=torch.int64)", MODES,
    ),
    Fault(
        "module: a call without dropout draws a number", "module/accelerate.py",
        "        if call.draws():\n", "        if True:\n", MODES,
    ),
    Fault(
        "module: an output that has no cotangent gives gradients", "module/run.py",
        "            reached = set().union(*(call.reaches[n] for n in given))\n",
        "            reached = set(call.leaves)\n", TAPE,
    ),
    Fault(
        "module: a cotangent that was not expected is dropped", "module/run.py",
        "            if not given.keys() <= set(left.ends):\n", "            if False:\n", TAPE,
    ),
    Fault(
        "module: a forward is run again though it gives something else", "module/run.py",
        "        if self._versions() != self._marks:\n", "        if False:\n", WAITING,
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
        "content[:1] if _checkpointing() else content", "content", TAPE,
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
        "if reason is None and uses_cache(model, kwargs, self._takes_cache):", "if False:",
        WAITING,
    ),
    Fault(
        "module: a wrapper keeps attributes to itself", "module/wrapper.py",
        "            setattr(held[\"module\"], name, value)",
        "            super().__setattr__(name, value)", ("module/test_wrapper.py",),
    ),
)  # fmt: skip
