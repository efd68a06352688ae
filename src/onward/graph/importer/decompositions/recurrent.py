"""RNN, GRU and LSTM, unrolled over a sequence of known length.

The equations are those of ONNX's operator pages. W, R and B hold one matrix or vector per gate,
stacked; P holds the peepholes i, o, f.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import (
    NodeCall,
    Results,
    decomposition,
    require_steps,
)
from onward.graph.types import DType

Gate: TypeAlias = "Callable[[Value], Value]"
_DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@decomposition("RNN", "GRU", "LSTM")
def _recurrent(c: NodeCall) -> Results:
    """An RNN, GRU or LSTM: X f[T,N,I] (f[N,T,I] in layout 1) -> Y f[T,D,N,H], Y_h f[D,N,H] and, for
    an LSTM, Y_c f[D,N,H]."""
    b, op = c.b, c.op_type
    layout, direction = int(c.attr("layout", 0)), c.attr("direction", "forward")
    x = b.transpose(c.x(), [1, 0, 2]) if layout else c.x()
    steps, batch, _ = type_of(x).shape
    if not isinstance(steps, int):
        raise ValueError(
            "its sequence length is open and cannot be unrolled; fix: give the dim a fixed size"
        )
    require_steps(steps)
    ways = 2 if direction == "bidirectional" else 1
    hidden = c.sizes(2)[2]
    ys: list[Value] = []
    ends: list[list[Value]] = []
    for way in range(ways):
        back = direction == "reverse" or way == 1
        state = [_initial(c, 5, way, layout, batch, hidden)]
        if op == "LSTM":
            state.append(_initial(c, 6, way, layout, batch, hidden))
        cell = _Cell(c, way, ways, hidden)
        made: list[Value | None] = [None] * steps
        parts = [x] if steps == 1 else b.Split(x, b.ints([1] * steps), axis=0)
        for step in range(steps):
            at = steps - 1 - step if back else step
            found = cell(b.squeeze(parts[at], [0]), state)
            y = found[0]
            if c.present(4):  # after a sequence's end the state is unchanged, and y is 0
                going = b.Less(np.array(at, np.int64), b.cast(c.x(4), DType.INT64))
                going = b.unsqueeze(going, [1])
                found = [b.Where(going, new, old) for new, old in zip(found, state, strict=True)]
                y = b.Where(going, y, 0.0)
            state, made[at] = found, y
        ys.append(_stack(c, [y for y in made if y is not None], 0))
        ends.append(state)
    y = _stack(c, ys, 1)  # f[T,D,N,H]
    finals = [_stack(c, [end[i] for end in ends], 0) for i in range(len(ends[0]))]
    if layout:
        y = b.transpose(y, [2, 0, 1, 3])
        finals = [b.transpose(end, [1, 0, 2]) for end in finals]
    return [y, *finals][: max(c.outputs, 1)]


def _stack(c: NodeCall, parts: list[Value], axis: int) -> Value:
    whole = [c.b.unsqueeze(p, [axis]) for p in parts]
    return whole[0] if len(whole) == 1 else c.b.Concat(*whole, axis=axis)


def _initial(c: NodeCall, i: int, way: int, layout: int, batch: Any, hidden: int) -> Value:
    if not c.present(i):
        return c.b.full(0, c.type().with_shape((batch, hidden)))
    axis = 1 if layout else 0
    return c.b.squeeze(c.b.slice(c.x(i), axis, way, way + 1), [axis])


class _Cell:
    """One step of one direction of a recurrent layer."""

    def __init__(self, c: NodeCall, way: int, ways: int, hidden: int) -> None:
        self.c, self.b, self.hidden = c, c.b, hidden
        gates = _GATES[c.op_type]

        def own(i: int) -> Value | None:
            return c.b.squeeze(c.b.slice(c.x(i), 0, way, way + 1), [0]) if c.present(i) else None

        w, r, bias = own(1), own(2), own(3)
        assert w is not None and r is not None
        self.w, self.r = c.b.transpose(w, [1, 0]), c.b.transpose(r, [1, 0])
        size = gates * hidden
        self.bw = None if bias is None else c.b.slice(bias, 0, 0, size)
        self.br = None if bias is None else c.b.slice(bias, 0, size, 2 * size)
        self.peepholes = own(7) if c.op_type == "LSTM" else None
        names = c.attr("activations") or _DEFAULTS[c.op_type] * ways
        each = len(_DEFAULTS[c.op_type])
        self.act = [
            _activation(c, way * each + i, n) for i, n in enumerate(names[way * each :][:each])
        ]

    def __call__(self, x: Value, state: list[Value]) -> list[Value]:
        match self.c.op_type:
            case "RNN":
                return [self.act[0](self.clip(self.b.Add(self.by_x(x), self.by_h(state[0]))))]
            case "GRU":
                return self._gru(x, state[0])
            case _:
                return self._lstm(x, *state)

    def by_x(self, x: Value) -> Value:
        y = self.b.MatMul(x, self.w)
        return y if self.bw is None else self.b.Add(y, self.bw)

    def by_h(self, h: Value) -> Value:
        y = self.b.MatMul(h, self.r)
        return y if self.br is None else self.b.Add(y, self.br)

    def clip(self, x: Value) -> Value:
        limit = self.c.attr("clip")
        if not limit:
            return x
        return self.b.Min(self.b.Max(x, -float(limit)), float(limit))

    def gates(self, x: Value) -> list[Value]:
        count = _GATES[self.c.op_type]
        return list(self.b.Split(x, self.b.ints([self.hidden] * count), axis=1))

    def _gru(self, x: Value, h: Value) -> list[Value]:
        b = self.b
        xz, xr, xh = self.gates(self.by_x(x))
        hz, hr, hh = self.gates(self.by_h(h))
        z = self.act[0](self.clip(b.Add(xz, hz)))
        r = self.act[0](self.clip(b.Add(xr, hr)))
        if self.c.attr("linear_before_reset", 0):
            new = b.Add(xh, b.Mul(r, hh))
        else:
            size = self.hidden
            y = b.MatMul(b.Mul(r, h), b.slice(self.r, 1, 2 * size, 3 * size))
            if self.br is not None:
                y = b.Add(y, b.slice(self.br, 0, 2 * size, 3 * size))
            new = b.Add(xh, y)
        n = self.act[1](self.clip(new))
        return [b.Add(b.Mul(b.Sub(1.0, z), n), b.Mul(z, h))]

    def _lstm(self, x: Value, h: Value, cell: Value) -> list[Value]:
        b = self.b
        i, o, f, g = self.gates(b.Add(self.by_x(x), self.by_h(h)))
        peep: list[Value | None] = [None] * 3
        if self.peepholes is not None:
            peep = list(b.Split(self.peepholes, b.ints([self.hidden] * 3), axis=0))

        def seen(gate: Value, i: int, cell: Value) -> Value:
            return gate if peep[i] is None else b.Add(gate, b.Mul(peep[i], cell))

        i = self.act[0](self.clip(seen(i, 0, cell)))
        f = (
            b.Sub(1.0, i)
            if self.c.attr("input_forget", 0)
            else self.act[0](self.clip(seen(f, 2, cell)))
        )
        g = self.act[1](self.clip(g))
        new = b.Add(b.Mul(f, cell), b.Mul(i, g))
        o = self.act[0](self.clip(seen(o, 1, new)))
        return [b.Mul(o, self.act[2](new)), new]


def _activation(c: NodeCall, i: int, name: str) -> Gate:
    b, op = c.b, name.capitalize() if name.islower() else name
    alphas, betas = c.attr("activation_alpha") or [], c.attr("activation_beta") or []
    alpha = alphas[i] if i < len(alphas) else None
    beta = betas[i] if i < len(betas) else None
    match op:
        case "Tanh" | "Sigmoid" | "Relu" | "Softplus":
            return lambda x: b.node(op, [x], {})  # type: ignore[return-value]
        case "Affine":
            return lambda x: b.Add(b.Mul(x, 1.0 if alpha is None else alpha), beta or 0.0)
        case "LeakyRelu":
            return lambda x: b.Where(b.Less(x, 0.0), b.Mul(x, 0.01 if alpha is None else alpha), x)
        case "Softsign":
            return lambda x: b.Div(x, b.Add(b.Abs(x), 1.0))
        case other:
            raise ValueError(f"its activation {other} is not supported")
