"""The steps of recurrent layers by PyTorch's operators.

`recurrence_ref` and `recurrence_backward_ref` are the plain loops over time; the kernels below
compute the same in given buffers. In backward, factors that depend on no gradient are computed for
all steps at once, in the buffer of the gates' gradients; each step then multiplies its own in
place.

Dims: T steps, N samples, H units, G gates (`GATES`: i f g o of an LSTM, r z n of a GRU), and I
numbers of the state, which is H without a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import linear

from onward.graph.ops.recurrent import GATES
from onward.graph.types import Type
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch

Tensor = torch.Tensor

# ---- the plain loops


@dataclass(frozen=True)
class RecurrentLayer:
    """One direction of a recurrent layer. kind: lstm, gru, tanh or relu."""

    kind: str
    reverse: bool
    gates: Tensor  # f[T,N,G*H]: the input's part of the gates
    r: Tensor  # f[G*H,I]: weights of the state's part
    bias: Tensor | None  # f[G*H]
    start: Tensor  # f[N,I]: the state before the first step
    cell: Tensor | None  # f[N,H]: the cell of an LSTM before the first step
    projection: Tensor | None  # f[I,H]: of an LSTM

    @property
    def steps(self) -> range:
        """The steps in the order of computation."""
        count = len(self.gates)
        return range(count)[::-1] if self.reverse else range(count)


def recurrence_ref(layer: RecurrentLayer) -> tuple[Tensor, Tensor | None]:
    """Returns the states f[T,N,I] and, for an LSTM, the cells f[T,N,H], computed step by step."""
    states, cells = {}, {}
    h, cell = layer.start, layer.cell  # f[N,I], f[N,H]
    for step in layer.steps:
        x = layer.gates[step]  # f[N,G*H]
        by_state = linear(h, layer.r, layer.bias)  # f[N,G*H]
        if layer.kind == "lstm":
            assert cell is not None
            i, f, g, o = (x + by_state).chunk(4, -1)  # f[N,H] each
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()  # f[N,H]
            h = o.sigmoid() * cell.tanh()  # f[N,H]
            if layer.projection is not None:
                h = h @ layer.projection.T  # f[N,I]
            cells[step] = cell
        elif layer.kind == "gru":
            r, z, n = x.chunk(3, -1)  # f[N,H] each
            hr, hz, hn = by_state.chunk(3, -1)  # f[N,H] each
            n = (n + (r + hr).sigmoid() * hn).tanh()  # f[N,H]
            h = (h - n) * (z + hz).sigmoid() + n  # f[N,H]
        elif layer.kind == "tanh":
            h = (x + by_state).tanh()  # f[N,H]
        else:
            h = (x + by_state).relu()  # f[N,H]
        states[step] = h
    return _in_time(states), _in_time(cells) if cells else None


@dataclass
class RecurrentGradients:
    """Gradients of a layer's tensors, in their shapes; None for what the layer does not have."""

    gates: Tensor  # f[T,N,G*H]
    r: Tensor  # f[G*H,I]
    bias: Tensor | None  # f[G*H]
    start: Tensor  # f[N,I]
    cell: Tensor | None  # f[N,H]
    projection: Tensor | None  # f[I,H]


def recurrence_backward_ref(
    layer: RecurrentLayer, dy: Tensor, dcells: Tensor | None, y: Tensor, cells: Tensor | None
) -> RecurrentGradients:
    """Returns a layer's gradients. dy: of its states, f[T,N,I]. dcells: of its cells, f[T,N,H];
    None for zeros. y, cells: the forward's results."""
    steps = list(layer.steps)
    dgates = {}
    dr, dbias = torch.zeros_like(layer.r), layer.r.new_zeros(len(layer.r))  # f[G*H,I], f[G*H]
    dh = torch.zeros_like(layer.start)  # f[N,I]
    dc = None if layer.cell is None else torch.zeros_like(layer.cell)  # f[N,H]
    dprojection = None if layer.projection is None else torch.zeros_like(layer.projection)
    for place, step in reversed(list(enumerate(steps))):
        last = y[steps[place - 1]] if place else layer.start  # f[N,I]: the state before the step
        x = layer.gates[step]  # f[N,G*H]
        by_state = linear(last, layer.r, layer.bias)  # f[N,G*H]
        dh = dh + dy[step]  # f[N,I]
        if layer.kind == "lstm":
            assert cells is not None and layer.cell is not None and dc is not None
            before = cells[steps[place - 1]] if place else layer.cell  # f[N,H]
            i, f, g, o = (x + by_state).chunk(4, -1)  # f[N,H] each
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            level = cells[step].tanh()  # f[N,H]
            dwide = dh  # f[N,H]
            if layer.projection is not None:
                assert dprojection is not None
                dprojection = dprojection + dh.T @ (o * level)  # f[I,H]
                dwide = dh @ layer.projection  # f[N,H]
            dc = dc + dwide * o * (1 - level**2)  # f[N,H]
            dc = dc if dcells is None else dc + dcells[step]
            di, df = dc * g * i * (1 - i), dc * before * f * (1 - f)  # f[N,H] each
            dg, do = dc * i * (1 - g**2), dwide * level * o * (1 - o)  # f[N,H] each
            dx = dby_state = torch.cat([di, df, dg, do], -1)  # f[N,G*H]
            dc = dc * f  # f[N,H]
            dh = dby_state @ layer.r  # f[N,I]
        elif layer.kind == "gru":
            r, z, n = x.chunk(3, -1)  # f[N,H] each
            hr, hz, hn = by_state.chunk(3, -1)  # f[N,H] each
            r, z = (r + hr).sigmoid(), (z + hz).sigmoid()  # f[N,H] each
            n = (n + r * hn).tanh()  # f[N,H]
            dn = dh * (1 - z) * (1 - n**2)  # f[N,H]
            dreset = dn * hn * r * (1 - r)  # f[N,H]
            dz = dh * (last - n) * z * (1 - z)  # f[N,H]
            dx = torch.cat([dreset, dz, dn], -1)  # f[N,G*H]
            dby_state = torch.cat([dreset, dz, dn * r], -1)  # f[N,G*H]
            dh = dh * z + dby_state @ layer.r  # f[N,H]
        else:
            slope = 1 - y[step] ** 2 if layer.kind == "tanh" else (y[step] > 0).to(y.dtype)
            dx = dby_state = dh * slope  # f[N,H]
            dh = dby_state @ layer.r  # f[N,H]
        dgates[step] = dx
        dr = dr + dby_state.T @ last  # f[G*H,I]
        dbias = dbias + dby_state.sum(0)  # f[G*H]
    held = None if layer.bias is None else dbias
    return RecurrentGradients(_in_time(dgates), dr, held, dh, dc, dprojection)


def _in_time(by_step: dict[int, Tensor]) -> Tensor:
    return torch.stack([by_step[step] for step in sorted(by_step)])


# ---- the same computations in given buffers


def _layer(args: KernelArguments, first: int) -> RecurrentLayer:
    """The layer whose tensors are the inputs from `first` on."""
    gates, r, bias, start, cell, projection = [*args.inputs[first:], None, None, None][:6]
    assert gates is not None and r is not None and start is not None
    kind, reverse = str(args.attrs["kind"]), bool(args.attrs["reverse"])
    return RecurrentLayer(kind, reverse, gates, r, bias, start, cell, projection)


def _by_state(layer: RecurrentLayer, h: Tensor, out: Tensor) -> Tensor:
    """The state's part of the gates for h f[N,I], written to out f[N,G*H]."""
    if layer.bias is None:
        return torch.mm(h, layer.r.t(), out=out)
    return torch.addmm(layer.bias, h, layer.r.t(), out=out)


def _split(layer: RecurrentLayer, x: Tensor) -> Tensor:
    """A view of x f[...,G*H] as f[...,G,H]."""
    return x.unflatten(-1, (GATES[layer.kind], -1))


def _bind_recurrence(args: KernelArguments) -> Launch:
    layer, y, room = _layer(args, 0), args.y, args.scratch[0]
    if layer.kind == "lstm":
        return partial(_lstm, layer, y, args.outputs[1], room, args.scratch[1])
    return partial(_gru if layer.kind == "gru" else _simple, layer, y, room)


def _simple(layer: RecurrentLayer, y: Tensor, room: Tensor) -> None:
    h = layer.start  # f[N,H]
    for step in layer.steps:
        _by_state(layer, h, room)
        h = torch.add(room, layer.gates[step], out=y[step])
        h = h.tanh_() if layer.kind == "tanh" else h.relu_()


def _gru(layer: RecurrentLayer, y: Tensor, room: Tensor) -> None:
    parts = _split(layer, room)  # f[N,3,H]
    h, (r, z, n) = layer.start, parts.unbind(1)  # f[N,H] each
    for step in layer.steps:
        _by_state(layer, h, room)
        x = _split(layer, layer.gates[step])  # f[N,3,H]
        parts[:, :2].add_(x[:, :2]).sigmoid_()
        n.mul_(r).add_(x[:, 2]).tanh_()
        h = torch.sub(h, n, out=y[step]).mul_(z).add_(n)


def _lstm(layer: RecurrentLayer, y: Tensor, cells: Tensor, room: Tensor, wide: Tensor) -> None:
    parts = _split(layer, room)  # f[N,4,H]
    i, f, g, o = parts.unbind(1)  # f[N,H] each
    h, cell = layer.start, layer.cell  # f[N,I], f[N,H]
    assert cell is not None
    for step in layer.steps:
        _by_state(layer, h, room)
        room.add_(layer.gates[step])
        parts[:, :2].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        cell = torch.mul(f, cell, out=cells[step]).addcmul_(i, g)
        if layer.projection is None:
            h = torch.tanh(cell, out=y[step]).mul_(o)
        else:
            torch.tanh(cell, out=wide).mul_(o)
            h = torch.mm(wide, layer.projection.t(), out=y[step])


def _bind_gradient(args: KernelArguments) -> Launch:
    layer, dy, y = _layer(args, 4), args.x(0), args.x(2)
    made = iter(args.outputs)
    held = [x is not None for x in [*args.inputs[4:], None, None, None][:6]]
    gates, r, bias, start, cell, projection = [next(made) if h else None for h in held]
    assert gates is not None and r is not None and start is not None
    grads = RecurrentGradients(gates, r, bias, start, cell, projection)
    states, dby_state = args.scratch[:2]  # f[T,N,I], f[T,N,G*H]
    if layer.kind == "lstm":
        cells, dcells = args.x(3), args.inputs[1]
        return partial(_lstm_backward, layer, grads, dy, dcells, y, cells, states, dby_state)
    if layer.kind == "gru":
        return partial(_gru_backward, layer, grads, dy, y, states, dby_state)
    return partial(_simple_backward, layer, grads, dy, y, states)


def _shifted(layer: RecurrentLayer, first: Tensor, states: Tensor, out: Tensor) -> Tensor:
    """The state before each step, written to out f[T,...]: `first`, then the states of earlier
    steps."""
    kept = len(states) - 1
    if layer.reverse:
        out[kept], out[:kept] = first, states[1:]
    else:
        out[0], out[1:] = first, states[:kept]
    return out


def _finish(grads: RecurrentGradients, dby_state: Tensor, states: Tensor) -> None:
    """Computes the gradients of weights and bias, as one product over all steps."""
    flat = dby_state.flatten(0, 1)  # f[T*N,G*H]
    torch.mm(flat.t(), states.flatten(0, 1), out=grads.r)
    if grads.bias is not None:
        torch.sum(flat, 0, out=grads.bias)


def _simple_backward(
    layer: RecurrentLayer, grads: RecurrentGradients, dy: Tensor, y: Tensor, states: Tensor
) -> None:
    _shifted(layer, layer.start, y, states)  # f[T,N,H]
    if layer.kind == "tanh":  # tanh' in y, f[T,N,H]
        torch.mul(y, y, out=grads.gates).neg_().add_(1.0)
    else:
        torch.gt(y, 0.0, out=grads.gates)
    dh: Tensor | None = None  # f[N,H]
    for step in reversed(layer.steps):
        grads.gates[step].mul_(dy[step] if dh is None else dh.add_(dy[step]))
        dh = torch.mm(grads.gates[step], layer.r, out=grads.start)
    _finish(grads, grads.gates, states)


def _gru_backward(
    layer: RecurrentLayer, grads: RecurrentGradients, dy: Tensor, y: Tensor, states: Tensor,
    dby_state: Tensor,
) -> None:  # fmt: skip
    _shifted(layer, layer.start, y, states)  # f[T,N,H]
    _by_state(layer, states.flatten(0, 1), dby_state.flatten(0, 1))
    hidden, slopes = _split(layer, dby_state), _split(layer, grads.gates)  # f[T,N,3,H] each
    slopes.copy_(_split(layer, layer.gates))
    slopes[:, :, :2].add_(hidden[:, :, :2]).sigmoid_()
    r, z, n = slopes.unbind(2)  # f[T,N,H] each
    n.addcmul_(r, hidden[:, :, 2]).tanh_()
    keep = z.clone()  # f[T,N,H]: z itself
    # from here on z, n and r hold the factors that turn dh into their gradients
    torch.sub(states, n, out=z).mul_(keep).mul_(1.0 - keep)  # (h - n) z (1 - z)
    n.square_().neg_().add_(1.0).mul_(1.0 - keep)  # (1 - n^2)(1 - z)
    weighed = hidden[:, :, 2].clone()  # f[T,N,H]: the term that r is multiplied with
    torch.mul(n, r, out=hidden[:, :, 2])
    r.mul_(1.0 - r).mul_(weighed).mul_(n)
    hidden[:, :, :2] = slopes[:, :, :2]
    dh: Tensor | None = None  # f[N,H]
    for step in reversed(layer.steps):
        dh = dy[step].clone() if dh is None else dh.add_(dy[step])
        slopes[step].mul_(dh[:, None])
        hidden[step].mul_(dh[:, None])
        dh.mul_(keep[step]).addmm_(dby_state[step], layer.r)
    assert dh is not None
    grads.start.copy_(dh)
    _finish(grads, dby_state, states)


def _lstm_backward(
    layer: RecurrentLayer, grads: RecurrentGradients, dy: Tensor, dcells: Tensor | None, y: Tensor,
    cells: Tensor, states: Tensor, gates: Tensor,
) -> None:  # fmt: skip
    assert layer.cell is not None and grads.cell is not None
    _shifted(layer, layer.start, y, states)  # f[T,N,I]
    _by_state(layer, states.flatten(0, 1), gates.flatten(0, 1))
    gates.add_(layer.gates)  # f[T,N,4*H]
    parts, slopes = _split(layer, gates), _split(layer, grads.gates)  # f[T,N,4,H] each
    parts[:, :, :2].sigmoid_()
    parts[:, :, 2].tanh_()
    parts[:, :, 3].sigmoid_()
    i, f, g, o = parts.unbind(2)  # f[T,N,H] each
    level = cells.tanh()  # f[T,N,H]
    torch.mul(i, 1.0 - i, out=slopes[:, :, 0]).mul_(g)  # i (1 - i) g
    before = _shifted(layer, layer.cell, cells, slopes[:, :, 1])
    before.mul_(f).mul_(1.0 - f)  # cell before, f (1 - f)
    torch.mul(g, g, out=slopes[:, :, 2]).neg_().add_(1.0).mul_(i)  # (1 - g^2) i
    torch.mul(o, 1.0 - o, out=slopes[:, :, 3]).mul_(level)  # o (1 - o) tanh(cell)
    projected = o * level if grads.projection is not None else None  # f[T,N,H]
    level.square_().neg_().add_(1.0).mul_(o)  # the factor from dh to the cell's gradient
    dh, dc = grads.start.zero_(), grads.cell.zero_()  # f[N,I], f[N,H]
    last = layer.steps[-1]
    for step in reversed(layer.steps):
        dh.add_(dy[step])
        dwide = dh  # f[N,H]
        if layer.projection is not None:
            assert projected is not None and grads.projection is not None
            if step == last:
                torch.mm(dh.t(), projected[step], out=grads.projection)
            else:
                grads.projection.addmm_(dh.t(), projected[step])
            dwide = torch.mm(dh, layer.projection)
        dc.addcmul_(dwide, level[step])
        if dcells is not None:
            dc.add_(dcells[step])
        slopes[step][:, :3].mul_(dc[:, None])
        slopes[step][:, 3].mul_(dwide)
        dc.mul_(f[step])
        torch.mm(grads.gates[step], layer.r, out=dh)
    _finish(grads, grads.gates, states)


def _scratch(spec: KernelSpec) -> list[Type]:
    gates, r = spec.inputs[0], spec.inputs[1]
    assert gates is not None and r is not None
    rows, width = gates.shape[1:]
    room = [gates.with_shape((rows, width))]
    lstm = spec.attrs["kind"] == "lstm"
    return [*room, spec.outputs[1].with_shape((rows, spec.outputs[1].shape[2]))] if lstm else room


def _gradient_scratch(spec: KernelSpec) -> list[Type]:
    """Scratch of a gradient: the state before each step; and the gates, or their gradients by the
    state's part."""
    y, gates = spec.inputs[2], spec.inputs[4]
    assert y is not None and gates is not None
    return [y, gates]


def _bytes(spec: KernelSpec) -> int:
    """Bytes of one step's temporaries, freed after the step."""
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
