"""Faults to plant in the sources, one at a time, and the tests that must find each.

A fault replaces a text that occurs exactly once in its file (below `src/onward`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """In `file`, `old` becomes `new`; `tests`, paths below `tests`, must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


RULES = ("differentiate/test_walk.py", "differentiate/test_rules.py")
CALLS = ("kernels/test_native_calls.py",)
KERNELS = ("kernels/test_kernels.py", "kernels/test_vectorised.py", "kernels/test_norm.py")
PLAN = ("plan",)
ROWS = ("rewrite/test_rows.py", "rewrite/test_rows_sets.py", "models/test_row_programs.py")
CAPTURE = (
    "capture/test_capture_ops.py",
    "capture/test_capture_numbers.py",
    "capture",
)  # the likeliest first
STATE = (
    "train/test_trainer_state.py",
    "train/test_trainer_api.py",
    "train/test_late_parameters.py",
    "train/test_optimizer_state.py",
    "train/test_saved_state.py",
    "train/test_come_and_go.py",
)

GUARDS = ("train/test_stale_graphs.py", "train/test_trainer_guards.py")
EFFECTS = ("capture/test_effects.py",)
AS_EAGER = ("capture/test_as_eager.py",)
PATCHES = ("capture/test_patches.py",)
HOOKS = ("train/test_refused_hooks.py",)
STEPS = ("train/test_whole_steps.py",)
TARGET = ("kernels/test_target.py",)

FAULTS: tuple[Fault, ...] = (
    # gradient rules
    Fault(
        "rule: softmax without its sum", "differentiate/rules.py",
        "return [b.Mul(b.Sub(dy, inner), y)]", "return [b.Mul(dy, y)]", RULES,
    ),
    Fault(
        "rule: abs at zero", "differentiate/rules.py",
        'unary("Abs", lambda b, dy, y, x: b.Mul(dy, b.Sign(x)))',
        'unary("Abs", lambda b, dy, y, x: b.Where(b.Less(x, 0.0), b.Neg(dy), dy))', RULES,
    ),
    Fault(
        "rule: relu passes at zero", "differentiate/rules.py",
        "b.Where(b.Greater(y, 0.0), dy, b.scalar(0.0, type_of(x).dtype))",
        "b.Where(b.GreaterOrEqual(y, 0.0), dy, b.scalar(0.0, type_of(x).dtype))", RULES,
    ),
    Fault(
        "rule: a maximum's ties go to one side", "differentiate/rules.py",
        "da = b.Where(tie, half, b.Where(a_wins, dy, zero))",
        "da = b.Where(a_wins, dy, zero)", RULES,
    ),
    Fault(
        "rule: ties of a reduced maximum count twice", "differentiate/rules.py",
        "share = b.Div(dy, b.reduce_sum(hit, dims, keepdims=True))", "share = dy", RULES,
    ),
    Fault(
        "rule: power with exponent zero", "differentiate/rules.py",
        "        if e == 0:\n            return (None, None)  # not 0 * x^-1, which is NaN at 0\n",
        "", RULES,
    ),
    Fault(
        "rule: the padding row learns", "differentiate/rules.py",
        "    return [_rows_added(b, weight, ids, dy), None]\n\n\n@rule(\"GatherElements\")",
        "    return [_rows_added(b, weight, ids, _only(dys)), None]\n\n\n@rule(\"GatherElements\")",
        RULES,
    ),
    Fault(
        "rule: a cumulative sum keeps its direction", "differentiate/rules.py",
        'reverse = 1 - attrs.get("reverse", 0)', 'reverse = attrs.get("reverse", 0)', RULES,
    ),
    Fault(
        "rule: a product's alpha reaches its addend", "differentiate/rules.py",
        "    return [dx, dw, dc]\n", "    return [dx, dw, dc if alpha == 1.0 else dy]\n", RULES,
    ),
    Fault(
        "rule: an added row's gradient", "differentiate/rules.py",
        "return [_only(dys), None, b.GatherND(_only(dys), xs[1])]",
        "return [_only(dys), None, None]", RULES,
    ),
    Fault(
        "walk: broadcast dims kept", "differentiate/reverse.py",
        "if s == 1 and have[extra + i] != 1]", "if s == 1 and have[extra + i] == 1]", RULES,
    ),
    Fault(
        "walk: the second reader's gradient replaces the first's", "differentiate/reverse.py",
        "gradients[x] = dx if held is None else b.Add(held, dx)", "gradients[x] = dx", RULES,
    ),
    Fault(
        "walk: a stopped gradient passes", "differentiate/reverse.py",
        '        if node.op_type in NO_GRADIENT or node.meta.get("stop_gradient"):\n'
        "            continue\n        if any(x in reached for x in node.inputs):",
        "        if node.op_type in NO_GRADIENT:\n            continue\n"
        "        if any(x in reached for x in node.inputs):", RULES,
    ),
    # rows
    Fault(
        "rows: causal is forgotten in what is reached", "rewrite/rows/sets.py",
        "return same and covers(b.members, a.members) and (a.causal or not b.causal)",
        "return same and covers(b.members, a.members)", ROWS,
    ),
    Fault(
        "rows: keys before the query are not reached", "rewrite/rows/sets.py",
        "behind = b.CumSum(number, b.const(np.array(1, np.int64)), reverse=1)",
        "behind = b.CumSum(number, b.const(np.array(1, np.int64)), reverse=0)", ROWS,
    ),
    Fault(
        "rows: a query whose keys are all hidden", "rewrite/rows/sets.py",
        "shown = b.Max(clear, none)", "shown = clear", ROWS,
    ),
    Fault(
        "rows: negative indices", "rewrite/rows/sets.py",
        "place = b.Where(b.Less(place, np.zeros((), np.int64)), wrapped, place)",
        "place = place", ROWS,
    ),
    Fault(
        "rows: one side of both is enough", "rewrite/rows/sets.py",
        "return b.And(condition_value(b, left, count), condition_value(b, right, count))",
        "return condition_value(b, left, count)", ROWS,
    ),
    Fault(
        "rows: a union keeps what is narrower", "rewrite/rows/sets.py",
        "kept = [other for other in kept if not implies(other, condition)]",
        "kept = [other for other in kept if not implies(condition, other)]", ROWS,
    ),
    # kernels
    Fault(
        "kernel: integer division rounds down", "kernels/aten/elementwise.py",
        'mode = None if args.y.is_floating_point() else "trunc"',
        'mode = None if args.y.is_floating_point() else "floor"', KERNELS,
    ),
    Fault(
        "kernel: where may be written over its condition's side", "kernels/aten/elementwise.py",
        '"Where": Kernel("aten.where", _bind_where, inplace=((0, 1), (0, 2))),',
        '"Where": Kernel("aten.where", _bind_where, inplace=((0, 0), (0, 2))),', (*KERNELS, *PLAN),
    ),
    Fault(
        "kernel: no label counts", "kernels/aten/loss.py",
        "        share.masked_fill_(ignored, 0.0)  # 0/0 where nothing counts\n", "",
        ("kernels", "capture/test_capture_losses.py"),
    ),
    Fault(
        "kernel: smoothing ignores the labels that count for nothing", "kernels/aten/loss.py",
        "        rows.masked_fill_(ignored, 0.0)\n        if reduction",
        "        if reduction", ("kernels", "capture/test_capture_losses.py"),
    ),
    Fault(
        "kernel: rows are summed though other dims are asked for", "kernels/native/reduce.py",
        "if sorted(dims) != list(range(count)) or not x.is_contiguous():",
        "if not x.is_contiguous():", KERNELS,
    ),
    Fault(
        "kernel: strided rows are summed as if they lay together", "kernels/native/reduce.py",
        "if sorted(dims) != list(range(count)) or not x.is_contiguous():",
        "if sorted(dims) != list(range(count)):", (*KERNELS, *PLAN),
    ),
    Fault(
        "native call: a tensor of any dtype is taken", "kernels/native/signatures.py",
        "if given.dtype == dtype and given.device.type", "if given.device.type", CALLS,
    ),
    Fault(
        "native call: a tensor with gaps counts as whole", "kernels/native/signatures.py",
        "argument.numel() if argument.is_contiguous() else 1", "argument.numel()", CALLS,
    ),
    Fault(
        "native call: fewer numbers than the call reads", "kernels/native/signatures.py",
        "if argument is not None and _numbers_behind(argument) < least:",
        "if argument is not None and _numbers_behind(argument) + 1 < least:", CALLS,
    ),
    Fault(
        "native call: negative sizes", "kernels/native/signatures.py",
        "            if given[name] < 0:\n", "            if given[name] < -(2**62):\n", CALLS,
    ),
    Fault(
        "kernel: the upper triangle's diagonal", "kernels/aten/elementwise.py",
        "return partial(function, args.x(0), diagonal=k, out=args.y)",
        "return partial(function, args.x(0), diagonal=0, out=args.y)", KERNELS,
    ),
    # plan
    Fault(
        "plan: buffers that meet at one launch share memory", "plan/arena.py",
        "(first <= last[i]) & (last >= first[i])", "(first < last[i]) & (last > first[i])", PLAN,
    ),
    Fault(
        "plan: a last read one launch early", "plan/liveness.py",
        "np.maximum.at(last, target, at[self._reader])",
        "np.maximum.at(last, target, at[self._reader] - 1)", PLAN,
    ),
    Fault(
        "plan: a window's readers do not count", "plan/storages.py",
        "for v in read if v is not None)",
        "for v in read if v is not None and v.producer() not in self.views)", PLAN,
    ),
    Fault(
        "plan: an output over an input that is read later", "plan/liveness.py",
        "    return last <= place\n", "    return True\n", PLAN,
    ),
    Fault(
        "plan: an output dies with its last reader", "plan/liveness.py",
        "        last[self._kept] = end\n", "", PLAN,
    ),
    Fault(
        "plan: an output over memory that another input shows too", "plan/storages.py",
        "self.layouts[v].buffer != storage or (v is x and i in rights)",
        "True", PLAN,
    ),
    Fault(
        "plan: an addend that is an operand too", "plan/storages.py",
        "(v is x and i in rights)", "v is x", PLAN,
    ),
    Fault(
        "plan: an update whose gradient shows the parameter", "plan/storages.py",
        "for j in rights] and self._alone(node, source, rights):", "for j in rights]:", PLAN,
    ),
    Fault(
        "plan: an output that shows a parameter after the update", "plan/placement.py",
        "        if name not in graph.state and _shown(value, storages.views) in "
        "graph.state.values():\n",
        "        if False:\n", PLAN,
    ),
    Fault(
        "plan: two outputs over one input", "plan/liveness.py",
        "if dies(until[x], place) and x not in taken:", "if dies(until[x], place):", PLAN,
    ),
    Fault(
        "plan: what is taken over dies with its first owner", "plan/placement.py",
        "            buffer.last = last\n", "", PLAN,
    ),
    Fault(
        "plan: state is replaced while it is still read", "plan/storages.py",
        "if last[source] <= maker and source not in self.kept:",
        "if source not in self.kept:", PLAN,
    ),
    Fault(
        "plan: what a Concat copies dies before it", "plan/storages.py",
        "        reads = self._at(node.inputs)\n", "        reads = self._at(node.outputs)\n", PLAN,
    ),
    Fault(
        "plan: an output over an input has strides of its own", "plan/placement.py",
        "            self._layouts[value] = self._replaced(access.node, before)\n", "", PLAN,
    ),
    Fault(
        "plan: state is not written back", "plan/planner.py",
        "            if here != there:\n", "            if False:\n", PLAN,
    ),
    Fault(
        "plan: an update before a reader", "plan/order.py",
        "            before |= set(source.consumers())\n", "            pass\n", PLAN,
    ),
    Fault(
        "plan: a Concat's part with several readers", "plan/output_layout.py",
        "if assigned is not None and not (others and steps):", "if assigned is not None:", PLAN,
    ),
    Fault(
        "plan: a slice of a window starts at the owner", "plan/views.py",
        "            offset = x.offset\n            starts, ends",
        "            offset = 0\n            starts, ends", PLAN,
    ),
    Fault(
        "plan: an expanded dim keeps its stride", "plan/views.py",
        "0 if size == 1 and out[0][extra + i] != 1 else stride", "stride", PLAN,
    ),
    # capture
    Fault(
        "capture: a clamp's bounds are exchanged", "capture/aten/elementwise.py",
        "        low, high = None, low\n", "        pass\n", CAPTURE,
    ),
    Fault(
        "capture: bits of whole numbers", "capture/aten/elementwise.py",
        "c.b.Not(x) if dtype == DType.BOOL else c.b.Sub(c.value(-1, dtype), x)",
        "c.b.Not(c.value(x, DType.BOOL))", CAPTURE,
    ),
    Fault(
        "capture: a reversed difference", "capture/aten/elementwise.py",
        'return _binary("Sub")(c, b, a if alpha == 1 else c.b.Mul(a, alpha))',
        'return _binary("Sub")(c, b, a)', CAPTURE,
    ),
    Fault(
        "capture: a negative index", "capture/aten/indexing.py",
        "        index = size + index\n", "        index = size + index - 1\n", CAPTURE,
    ),
    Fault(
        "capture: padding starts with the first dim", "capture/aten/shape.py",
        "begin[rank - 1 - i], end[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]",
        "begin[i], end[i] = pads[2 * i], pads[2 * i + 1]", CAPTURE,
    ),
    Fault(
        "capture: a softmax moves its dim and leaves it", "capture/aten/norm.py",
        "    return c.b.transpose(y, back)\n", "    return c.b.transpose(y, swap)\n", CAPTURE,
    ),
    # optimizer
    Fault(
        "state: adopted counts take the least", "train/updates.py",
        "self.done = max(self.counts.values(), default=0)",
        "self.done = min(self.counts.values(), default=0)", STATE,
    ),
    Fault(
        "state: counts start with the session", "train/updates.py",
        "values[name] = self.counts.get(self._members[clock][0], 0) + 1",
        "values[name] = self.done + 1", STATE,
    ),
    Fault(
        "state: frozen parameters' steps move", "train/updates.py",
        "moved = [p for clock in signature.clocks for p in self._members[clock]]",
        "moved = [p for members in self._members.values() for p in members]", STATE,
    ),
    Fault(
        "state: sums of micro-batches are kept", "train/updates.py",
        "self.tensor(self._names[name], ACCUMULATOR).zero_()",
        "self.tensor(self._names[name], ACCUMULATOR)", STATE,
    ),
    Fault(
        "state: a velocity's first step", "train/updates.py",
        "uncounted = max(1, self.counts.get(p, 1))", "uncounted = self.counts.get(p, 0)", STATE,
    ),
    Fault(
        "update: clipping without its epsilon", "differentiate/update/clip.py",
        "b.Add(norm, EPSILON)", "b.Add(norm, 0.0)", ("train/test_clipping.py",),
    ),
    Fault(
        "update: clipping makes small gradients large", "differentiate/update/clip.py",
        "scale = b.Min(b.Div(recipe.max_grad_norm, b.Add(norm, EPSILON)), 1.0)",
        "scale = b.Div(recipe.max_grad_norm, b.Add(norm, EPSILON))", ("train/test_clipping.py",),
    ),
    # guards
    Fault(
        "guard: module buffers", "capture/object_graph/walk.py",
        'for name in ("_parameters", "_buffers"):', 'for name in ("_parameters",):', GUARDS,
    ),
    Fault(
        "guard: what requires a gradient", "capture/object_graph/walk.py",
        "type(x), x.requires_grad, x.dtype", "type(x), x.dtype", GUARDS,
    ),
    Fault(
        "guard: training flags", "train/guards.py",
        "paths += self._read_flags(model)", "self._read_flags(model)", GUARDS,
    ),
    Fault(
        "guard: baked tensors", "train/guards.py",
        "        if not kept:\n", "        if False:\n", GUARDS,
    ),
    # what a forward does beside its result
    Fault(
        "effects: what is left is not compared", "capture/rehearsal.py",
        "if not (_equal(given, again[0]) and _alike(left, again[1])):",
        "if not _equal(given, again[0]):", EFFECTS,
    ),
    Fault(
        "effects: what is given is not compared", "capture/rehearsal.py",
        "if not (_equal(given, again[0]) and _alike(left, again[1])):",
        "if not _alike(left, again[1]):", EFFECTS,
    ),
    Fault(
        "effects: tensors stay set", "capture/rehearsal.py",
        "effects.left = steady or all(_told(fact) == fact for fact in kept)",
        "effects.left = True", EFFECTS,
    ),
    Fault(
        "effects: tables do not stay", "capture/rehearsal.py",
        "effects.left = steady or all(", "effects.left = all(", EFFECTS,
    ),
    Fault(
        "effects: tables that stay are not watched", "capture/export.py",
        "        result.constants += flat.effects.tensors", "        pass", EFFECTS,
    ),
    Fault(
        "effects: no other batch in between", "capture/rehearsal.py",
        "self._give([_another(t, all_differ) for t in self._batch])", "pass", EFFECTS,
    ),
    Fault(
        "effects: no smaller batch in between", "capture/rehearsal.py",
        "            self._give(self._smaller())", "            pass", EFFECTS,
    ),
    Fault(
        "effects: no other parameters in between", "capture/rehearsal.py",
        "changed = _another(t.detach(), t.is_floating_point())", "changed = t.detach()", EFFECTS,
    ),
    Fault(
        "effects: what is set on parameters is not seen", "capture/object_graph/snapshot.py",
        'self.visit(value, f"{path}.{name}")', "pass", EFFECTS,
    ),
    Fault(
        "guard: what is set on a tensor", "capture/object_graph/walk.py",
        "        self._attributes(x, path, self.depth)\n        try:", "        try:", GUARDS,
    ),
    Fault(
        "guard: the class of a tensor", "capture/object_graph/sweep.py",
        'attrgetter("__class__", "requires_grad"', 'attrgetter("requires_grad"',
        ("train/test_batches.py",),
    ),
    Fault(
        "effects: the other mode is not looked at", "capture/rehearsal.py",
        "if not effects.left and not self._other_mode_is_blind():", "if False:", EFFECTS,
    ),
    Fault(
        "effects: names of a module are not put back", "capture/object_graph/snapshot.py",
        "                scope[name] = value", "                pass", EFFECTS,
    ),
    Fault(
        "effects: graphs outlive what another capture sets", "train/trainer.py",
        "                self._train.clear()\n                self._eval.clear()\n",
        "                pass\n", EFFECTS,
    ),
    Fault(
        "effects: an iterator's place is not seen", "capture/object_graph/facts.py",
        "    if left >= 0 or not depth:\n        return left",
        "    if left >= 0 or not depth:\n        return None", EFFECTS,
    ),
    Fault(
        "encoder: hidden tokens before visible ones", "capture/transformer_encoder.py",
        "torch.where((hidden & last)[..., None], empty, y)",
        "torch.where(hidden[..., None], empty, y)", ("capture/test_transformer_encoder.py",),
    ),
    Fault(
        "capture: a size that the trace fixes stays open", "capture/sizes.py",
        "                found |= {size: first[size] for size in sizes}", "                pass",
        ("capture/test_sizes.py",),
    ),
    Fault(
        "capture: a relation of two sizes fixes them", "capture/sizes.py",
        "len(factors) == 1 and _solved(factor)", "False",
        ("capture/test_sizes.py",),
    ),
    Fault(
        "capture: sizes that two dims have in common stay open", "capture/sizes.py",
        "len(factors) == 1 and _solved(factor)", "_solved(factor)",
        ("capture/test_sizes.py",),
    ),
    Fault(
        "capture: tensors of a class of their own pass", "capture/refusals.py",
        "return None if plain else", "return None if True else",
        ("train/test_batches.py",),
    ),
    Fault(
        "capture: inference_mode stops no gradient", "capture/as_eager.py",
        "torch.set_grad_enabled(not context.mode)", "torch.set_grad_enabled(True)", AS_EAGER,
    ),
    Fault(
        "capture: a trace says that it compiles", "capture/as_eager.py",
        "return not asked() and plain()", "return plain()", AS_EAGER,
    ),
    Fault(
        "capture: a name for is_compiling is not seen", "capture/as_eager.py",
        "x.__name__ in _COMPILERS.get(x.__module__, ())", "False", AS_EAGER,
    ),
    Fault(
        "capture: a trace's tensors are of a class of their own", "capture/as_eager.py",
        "if type(x) is FakeTensor:", "if False:", AS_EAGER,
    ),
    Fault(
        "capture: a size is no int", "capture/as_eager.py",
        "if type(x) in _NUMBERS else isinstance", "if False else isinstance", AS_EAGER,
    ),
    Fault(
        "capture: a written size stays open", "capture/as_eager.py",
        "*spec) if asked() else", "*spec) if False else", AS_EAGER,
    ),
    Fault(
        "capture: layouts that were asked for are not watched", "capture/export.py",
        "if flat.noted.lies:", "if False:", AS_EAGER,
    ),
    Fault(
        "capture: a question through the class is not seen", "capture/as_eager.py",
        "yield torch.Tensor, name, of_layout", "yield FakeTensor, name, of_layout", AS_EAGER,
    ),
    Fault(
        "capture: a name for a question is not seen", "capture/as_eager.py",
        "if id(x) in known_as]", "if False]", AS_EAGER,
    ),
    Fault(
        "patches: all threads see them", "capture/patches.py",
        "replacement if threading.get_ident() == here else plain", "replacement", PATCHES,
    ),
    Fault(
        "patches: what is put back last is lost to an interrupt", "capture/patches.py",
        "                _put(*before[-1])\n                before.pop()\n",
        "                _put(*before.pop())\n", PATCHES,
    ),
    Fault(
        "patches: the first place is put back first", "capture/patches.py",
        "                _put(*before[-1])\n                before.pop()\n",
        "                _put(*before[0])\n                before.pop(0)\n", PATCHES,
    ),
    Fault(
        "patches: an interrupt comes before a place is noted", "capture/patches.py",
        "            before.append((owner, name, own))  # before it is set: an interrupt may come\n"
        "            _put(owner, name, visible)\n",
        "            _put(owner, name, visible)\n            before.append((owner, name, own))\n",
        PATCHES,
    ),
    Fault(
        "patches: what was absent stays", "capture/patches.py",
        "        delattr(owner, name)", "        pass", PATCHES,
    ),
    Fault(
        "capture: hooks on nodes pass", "capture/as_eager.py",
        "if name in _NODE_HOOKS:", "if False:", HOOKS,
    ),
    Fault(
        "capture: parameters may be frozen in a forward", "capture/as_eager.py",
        "if id(x) in changed:", "if False:", HOOKS,
    ),
    Fault(
        "capture: saved tensors hooks pass", "capture/gradient_code.py",
        "if not keeps_numbers(context.pack_hook):", "if False:", HOOKS,
    ),
    Fault(
        "capture: saved tensors hooks around a step pass", "capture/refusals.py",
        "if packing and not", "if False and not", HOOKS,
    ),
    Fault(
        "capture: parameters that no one lists are constants", "capture/export.py",
        "            refuse_unlisted(read, model, loss_fn)", "            pass",
        ("train/test_unlisted.py",),
    ),
    Fault(
        "capture: numbers before sizes", "capture/captured_module.py",
        "        dims: dict[str, int] = {}\n        for leaf, dim, size in self._sizes:",
        "        if not self.suits(tensors):\n            return None\n"
        "        dims: dict[str, int] = {}\n        for leaf, dim, size in self._sizes:",
        ("kernels/test_hidden_rows.py",),
    ),
    Fault(
        "updates: counts of what is gone", "train/updates.py",
        "        if gone:\n", "        if False:\n", STATE,
    ),
    Fault(
        "bind: sizes asked for late", "plan/bind.py",
        "    noop(bound)  # which may ask for sizes itself\n"
        "    if open:\n        name_sizes(bound)\n",
        "    if open:\n        name_sizes(bound)\n    noop(bound)\n", PLAN,
    ),
    # fusions, where kernels take them
    Fault(
        "fusion: nobody asks about the gradient", "plan/fusible.py",
        "if reason is None and fusion.gradient:", "if False:", TARGET,
    ),
    Fault(
        "fusion: the whole gradient's graph is asked", "plan/fusible.py",
        'if n.domain == ONWARD and n.meta.get("backward")]', "if n.domain == ONWARD]", TARGET,
    ),
    Fault(
        "fusion: what is refused is written", "rewrite/context.py",
        "return reason is None or self.missed(place, op, reason)",
        "return reason is None or not self.missed(place, op, reason)", TARGET,
    ),
    Fault(
        "fusion: a trained mask loses its gradient's place", "rewrite/flash_attention.py",
        "type_of(mask).dtype != DType.BOOL and mask in trained", "False",
        ("rewrite/test_passes.py",),
    ),
    Fault(
        "fusion: a product that others read", "rewrite/bias_activation.py",
        "if u in outputs or any(user not in readers for user in u.consumers()):", "if False:",
        ("rewrite/test_bias_activation.py",),
    ),
    Fault(
        "kernel_for: measured sizes are asked for before they are known", "kernels/__init__.py",
        "kernel.faster(spec) if spec.is_static else None", "kernel.faster(spec)", TARGET,
    ),
    Fault(
        "kernel_for: the target is not asked", "kernels/__init__.py",
        "reason = kernel.where(target) or kernel.unsupported(spec)", "reason = kernel.unsupported(spec)",
        TARGET,
    ),
    Fault(
        "rows: a kernel that refuses packed rows gets them", "rewrite/rows/rules/attention.py",
        "if not p.context.takes(node, node.op_type, _packed(q, k, v, draw), attributes(node)):",
        "if False:", TARGET,
    ),
    # a step's commit
    Fault(
        "step: updates before all gradients", "plan/order.py",
        'last = any(node.op_type == "AllFinite" for node in graph)', "last = False", STEPS,
    ),
    Fault(
        "step: signals do not wait", "execute/executable.py",
        "            with signals_wait():\n", "            if True:\n", STEPS,
    ),
    Fault(
        "step: a strided parameter without a place", "execute/tensors.py",
        "                if tensor.is_contiguous():\n                    return tensor\n",
        "                return tensor\n", ("train/test_storage.py",),
    ),
    Fault(
        "names: a batch's leaf without its word", "graph/names.py",
        'PARAM, BUFFER, BATCH, OUTPUT = "param.", "buffer.", "batch.", "output."',
        'PARAM, BUFFER, BATCH, OUTPUT = "param.", "buffer.", "", "output."',
        ("train/test_names.py",),
    ),
)  # fmt: skip
