"""The steps of recurrent layers by PyTorch's operators.

Backward, what of a gate's slope is known before any gradient is computed of all steps at once, and
lies where the gradients of the gates will: each step scales its own.
"""

from __future__ import annotations

import torch

from onward.graph.ops.recurrent import GATES
from onward.graph.types import Type
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch


class _Layer:
    """The tensors of one direction of a layer: gates f[T,N,G*H], weights, states."""

    def __init__(self, args: KernelArguments, first: int) -> None:
        given = [*args.inputs[first:], None, None, None][:6]
        gates, r, self.bias, start, self.cell, self.projection = given
        assert gates is not None and r is not None and start is not None
        self.gates, self.r, self.start, self.kind = gates, r, start, str(args.attrs["kind"])
        self.count, self.batch, self.width = gates.shape
        steps = list(range(self.count))
        self.steps = steps[::-1] if args.attrs["reverse"] else steps

    def of_state(self, h: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return torch.mm(h, self.r.t(), out=out)
        return torch.addmm(self.bias, h, self.r.t(), out=out)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """x with a dim for its gates, `[...,G,H]`."""
        return x.unflatten(-1, (GATES[self.kind], -1))

    def before(self, first: torch.Tensor, states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The states that each step was given: all states, moved by one step."""
        kept = self.count - 1
        if self.steps[0] == 0:
            out[0], out[1:] = first, states[:kept]
        else:
            out[kept], out[:kept] = first, states[1:]
        return out


def _bind_recurrence(args: KernelArguments) -> Launch:
    layer, y, (room,) = _Layer(args, 0), args.y, args.scratch[:1]
    parts = layer.split(room)
    if layer.kind == "lstm":
        return _lstm(layer, y, args.outputs[1], room, args.scratch[1])

    def simple() -> None:
        h = layer.start
        for step in layer.steps:
            layer.of_state(h, room)
            h = torch.add(room, layer.gates[step], out=y[step])
            h = h.tanh_() if layer.kind == "tanh" else h.relu_()

    def gru() -> None:
        h, (r, z, n) = layer.start, parts.unbind(1)
        for step in layer.steps:
            layer.of_state(h, room)
            given = layer.split(layer.gates[step])
            parts[:, :2].add_(given[:, :2]).sigmoid_()
            n.mul_(r).add_(given[:, 2]).tanh_()
            h = torch.sub(h, n, out=y[step]).mul_(z).add_(n)

    return gru if layer.kind == "gru" else simple


def _lstm(
    layer: _Layer, y: torch.Tensor, cells: torch.Tensor, room: torch.Tensor, wide: torch.Tensor
) -> Launch:
    parts = layer.split(room)
    i, f, g, o = parts.unbind(1)
    assert layer.cell is not None
    first, projection = layer.cell, layer.projection

    def launch() -> None:
        h, cell = layer.start, first
        for step in layer.steps:
            layer.of_state(h, room)
            room.add_(layer.gates[step])
            parts[:, :2].sigmoid_()
            g.tanh_()
            o.sigmoid_()
            cell = torch.mul(f, cell, out=cells[step]).addcmul_(i, g)
            if projection is None:
                h = torch.tanh(cell, out=y[step]).mul_(o)
            else:
                torch.tanh(cell, out=wide).mul_(o)
                h = torch.mm(wide, projection.t(), out=y[step])

    return launch


def _bind_gradient(args: KernelArguments) -> Launch:
    layer, dy, y = _Layer(args, 4), args.x(0), args.x(2)
    held = [x is not None for x in [*args.inputs[4:], None, None, None][:6]]
    made = iter(args.outputs)
    dgates, dr, dbias, dstart, dcell, dprojection = [next(made) if h else None for h in held]
    assert dgates is not None and dr is not None and dstart is not None
    states, dhidden = args.scratch[:2]
    order = layer.steps[::-1]

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)

    def finish(hidden: torch.Tensor) -> None:
        torch.mm(flat(hidden).t(), flat(states), out=dr)
        if dbias is not None:
            torch.sum(flat(hidden), 0, out=dbias)

    def simple() -> None:
        layer.before(layer.start, y, states)
        if layer.kind == "tanh":
            torch.mul(y, y, out=dgates).neg_().add_(1.0)
        else:
            torch.gt(y, 0.0, out=dgates)
        dh: torch.Tensor | None = None
        for step in order:
            dgates[step].mul_(dy[step] if dh is None else dh.add_(dy[step]))
            dh = torch.mm(dgates[step], layer.r, out=dstart)
        finish(dgates)

    def gru() -> None:
        layer.before(layer.start, y, states)
        layer.of_state(flat(states), flat(dhidden))
        hidden, slopes = layer.split(dhidden), layer.split(dgates)
        slopes.copy_(layer.split(layer.gates))
        slopes[:, :, :2].add_(hidden[:, :, :2]).sigmoid_()
        r, z, n = slopes.unbind(2)
        n.addcmul_(r, hidden[:, :, 2]).tanh_()
        keep = z.clone()
        torch.sub(states, n, out=z).mul_(keep).mul_(1.0 - keep)
        n.square_().neg_().add_(1.0).mul_(1.0 - keep)
        weighed = hidden[:, :, 2].clone()
        torch.mul(n, r, out=hidden[:, :, 2])
        r.mul_(1.0 - r).mul_(weighed).mul_(n)
        hidden[:, :, :2] = slopes[:, :, :2]
        dh: torch.Tensor | None = None
        for step in order:
            dh = dy[step].clone() if dh is None else dh.add_(dy[step])
            slopes[step].mul_(dh[:, None])
            hidden[step].mul_(dh[:, None])
            dh.mul_(keep[step]).addmm_(dhidden[step], layer.r)
        assert dh is not None
        dstart.copy_(dh)
        finish(dhidden)

    def lstm() -> None:
        dcells, cells = args.inputs[1], args.x(3)
        assert layer.cell is not None and dcell is not None
        layer.before(layer.start, y, states)
        layer.of_state(flat(states), flat(dhidden))
        dhidden.add_(layer.gates)
        parts, slopes = layer.split(dhidden), layer.split(dgates)
        parts[:, :, :2].sigmoid_()
        parts[:, :, 2].tanh_()
        parts[:, :, 3].sigmoid_()
        i, f, g, o = parts.unbind(2)
        level = cells.tanh()
        torch.mul(i, 1.0 - i, out=slopes[:, :, 0]).mul_(g)
        last = layer.before(layer.cell, cells, slopes[:, :, 1])
        last.mul_(f).mul_(1.0 - f)
        torch.mul(g, g, out=slopes[:, :, 2]).neg_().add_(1.0).mul_(i)
        torch.mul(o, 1.0 - o, out=slopes[:, :, 3]).mul_(level)
        given = o * level if dprojection is not None else None
        level.square_().neg_().add_(1.0).mul_(o)  # of a cell's gradient, of its state's
        dh, dc = dstart.zero_(), dcell.zero_()
        for step in order:
            dh.add_(dy[step])
            wide = dh
            if layer.projection is not None:
                assert given is not None and dprojection is not None
                if step == order[0]:
                    torch.mm(dh.t(), given[step], out=dprojection)
                else:
                    dprojection.addmm_(dh.t(), given[step])
                wide = torch.mm(dh, layer.projection)
            dc.addcmul_(wide, level[step])
            if dcells is not None:
                dc.add_(dcells[step])
            slopes[step][:, :3].mul_(dc[:, None])
            slopes[step][:, 3].mul_(wide)
            dc.mul_(f[step])
            torch.mm(dgates[step], layer.r, out=dh)
        finish(dgates)

    return {"lstm": lstm, "gru": gru}.get(layer.kind, simple)


def _scratch(spec: KernelSpec) -> list[Type]:
    gates, r = spec.inputs[0], spec.inputs[1]
    assert gates is not None and r is not None
    rows, width = gates.shape[1:]
    room = [gates.with_shape((rows, width))]
    lstm = spec.attrs["kind"] == "lstm"
    return [*room, spec.outputs[1].with_shape((rows, spec.outputs[1].shape[2]))] if lstm else room


def _gradient_scratch(spec: KernelSpec) -> list[Type]:
    """The scratch of a gradient: the states that each step was given, and the gates as they are, or
    their gradients as the state's."""
    y, gates = spec.inputs[2], spec.inputs[4]
    assert y is not None and gates is not None
    return [y, gates]


def _bytes(spec: KernelSpec) -> int:
    """Bytes of one step's temporaries, which are freed after the step."""
    return sum(t.nbytes for t in spec.outputs) + 2**14


def _gradient_bytes(spec: KernelSpec) -> int:
    gates = spec.inputs[4]
    assert gates is not None
    return 2 * gates.nbytes + 2 * sum(t.nbytes for t in spec.outputs[1:]) + 2**14


def _one_type(spec: KernelSpec) -> str | None:
    dtypes = {t.dtype for t in spec.inputs if t is not None}
    return None if len(dtypes) == 1 else f"element types {sorted(map(str, dtypes))}"


KERNELS: dict[str, Kernel] = {
    "Recurrence": Kernel(
        "aten.recurrence", _bind_recurrence, unsupported=_one_type, contiguous=None,
        scratch=_scratch, workspace=_bytes,
    ),
    "RecurrenceGrad": Kernel(
        "aten.recurrence_backward", _bind_gradient, unsupported=_one_type, contiguous=None,
        scratch=_gradient_scratch, workspace=_gradient_bytes,
    ),
}  # fmt: skip
