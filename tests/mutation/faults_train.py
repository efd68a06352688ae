"""Faults of optimizer state, guards, a step's commit."""

from __future__ import annotations

from fault import GUARDS, STATE, STEPS, Fault

TRAIN_FAULTS: tuple[Fault, ...] = (
    # optimizer
    Fault(
        "state: adopted counts take the least", "train/optimizer_state.py",
        "return max(self.counts.values(), default=default)",
        "return min(self.counts.values(), default=default)", STATE,
    ),
    Fault(
        "state: counts start with the session", "train/updates.py",
        "values[name] = self.state.counts.get(self._clocks.members(clock)[0], 0) + 1",
        "values[name] = self.done + 1", STATE,
    ),
    Fault(
        "state: frozen parameters' steps move", "train/updates.py",
        "p for clock in signature.clocks for p in self._clocks.members(clock)",
        "p for members in self._clocks._members.values() for p in members", STATE,
    ),
    Fault(
        "state: sums of micro-batches are kept", "train/updates.py",
        "self.state.tensor(p, ACCUMULATOR).zero_()",
        "self.state.tensor(p, ACCUMULATOR)", STATE,
    ),
    Fault(
        "state: a velocity's first step", "train/torch_state.py",
        "uncounted = max(1, self._own.counts.get(p, 1))",
        "uncounted = self._own.counts.get(p, 0)", STATE,
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
    Fault(
        "names: a result that is called loss is taken for the loss", "capture/export.py",
        "zip(flat.noted.names[first:], outputs[first:], strict=True))\n"
        "    loss = outputs[0] if want_loss else None\n",
        "zip(flat.noted.names, outputs, strict=True))\n"
        "    loss = results.pop(flat.noted.names[0]) if want_loss else None\n",
        ("train/test_names.py",),
    ),
)  # fmt: skip
