"""Recurrent layers: LSTM (https://doi.org/10.1162/neco.1997.9.8.1735), GRU
(https://arxiv.org/abs/1406.1078, with the reset gate after the product) and Elman's, as PyTorch
computes them. Products with the input sequence are computed before, for all steps at once; these
ops do the steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, Types
from onward.graph.scan import scan
from onward.graph.types import Size, Type, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value

GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}


class _Cell:
    """One step of a recurrent layer."""

    def __init__(self, b: Builder, kind: str, given: list[Value], names: list[str]) -> None:
        """Keeps the weights of a layer. given: those present. names: their names, in the same
        order."""
        held = dict(zip(names, given, strict=True))
        self.b, self.kind, self.r = b, kind, held["r"]
        self.bias, self.projection = held.get("bias"), held.get("projection")

    def split(self, x: Value) -> list[Value]:
        """Splits x into gates, each f[N,H]."""
        count = GATES[self.kind]
        size = int(type_of(x).shape[1]) // count  # type: ignore[arg-type]
        if count == 1:
            return [x]
        return [self.b.slice(x, 1, i * size, (i + 1) * size) for i in range(count)]

    def of_state(self, h: Value) -> Value:
        y = self.b.MatMul(h, self.b.transpose(self.r, [1, 0]))
        return y if self.bias is None else self.b.Add(y, self.bias)

    def lstm(self, x: Value, h: Value) -> list[Value]:
        """The gates i, f, g, o of an LSTM, each f[N,H]."""
        b = self.b
        i, f, g, o = self.split(b.Add(x, self.of_state(h)))
        return [b.Sigmoid(i), b.Sigmoid(f), b.Tanh(g), b.Sigmoid(o)]

    def gru(self, x: Value, h: Value) -> list[Value]:
        """The gates r, z, n of a GRU, and the term that r is multiplied with, each f[N,H]."""
        b = self.b
        xr, xz, xn = self.split(x)
        hr, hz, hn = self.split(self.of_state(h))
        r, z = b.Sigmoid(b.Add(xr, hr)), b.Sigmoid(b.Add(xz, hz))
        return [r, z, b.Tanh(b.Add(xn, b.Mul(r, hn))), hn]

    def next(self, x: Value, state: list[Value]) -> list[Value]:
        """The next state, and an LSTM's next cell, given the step's input x to the gates."""
        b, h = self.b, state[0]
        match self.kind:
            case "lstm":
                i, f, g, o = self.lstm(x, h)
                cell = b.Add(b.Mul(f, state[1]), b.Mul(i, g))
                h = b.Mul(o, b.Tanh(cell))
                if self.projection is not None:
                    h = b.MatMul(h, b.transpose(self.projection, [1, 0]))
                return [h, cell]
            case "gru":
                _, z, n, _ = self.gru(x, h)
                return [b.Add(b.Mul(b.Sub(h, n), z), n)]
            case "tanh":
                return [b.Tanh(b.Add(x, self.of_state(h)))]
            case _:
                return [b.Relu(b.Add(x, self.of_state(h)))]

    def lstm_back(
        self, dh: Value, dc: Value, x: Value, last: Value, before: Value, cell: Value
    ) -> tuple[list[Value], list[Value]]:
        """The gradients of the step's previous state and cell; and those of the gates (twice: by
        input and by state), with a projection followed by its input."""
        b = self.b
        i, f, g, o = self.lstm(x, last)
        level = b.Tanh(cell)
        more: list[Value] = []
        if self.projection is not None:
            more = [b.Mul(o, level)]
            dh = b.MatMul(dh, self.projection)
        dc = b.Add(dc, b.Mul(b.Mul(dh, o), _slope_of_tanh(b, level)))
        dgates = b.Concat(
            b.Mul(b.Mul(dc, g), _slope_of_sigmoid(b, i)),
            b.Mul(b.Mul(dc, before), _slope_of_sigmoid(b, f)),
            b.Mul(b.Mul(dc, i), _slope_of_tanh(b, g)),
            b.Mul(b.Mul(dh, level), _slope_of_sigmoid(b, o)),
            axis=1,
        )
        return [b.MatMul(dgates, self.r), b.Mul(dc, f)], [dgates, dgates, *more]

    def back(self, dh: Value, x: Value, last: Value, y: Value) -> tuple[list[Value], list[Value]]:
        """The gradient of the step's previous state; and those of the gates by input and by
        state."""
        b = self.b
        if self.kind == "gru":
            r, z, n, weighed = self.gru(x, last)
            dn = b.Mul(b.Mul(dh, b.Sub(1.0, z)), _slope_of_tanh(b, n))
            dr = b.Mul(b.Mul(dn, weighed), _slope_of_sigmoid(b, r))
            dz = b.Mul(b.Mul(dh, b.Sub(last, n)), _slope_of_sigmoid(b, z))
            dhidden = b.Concat(dr, dz, b.Mul(dn, r), axis=1)
            kept = b.Mul(dh, z)
            return [b.Add(b.MatMul(dhidden, self.r), kept)], [b.Concat(dr, dz, dn, axis=1), dhidden]
        if self.kind == "tanh":
            dgates = b.Mul(dh, _slope_of_tanh(b, y))
        else:
            dgates = b.Where(b.Greater(y, 0.0), dh, 0.0)
        return [b.MatMul(dgates, self.r)], [dgates, dgates]


_WEIGHTS = ("r", "bias", "projection")


def _weights(inputs: list[Value | None]) -> tuple[list[Value], list[str]]:
    """The weights that are present among a layer's inputs, and their names."""
    whole = [*inputs, None, None, None]
    found = zip(_WEIGHTS, (whole[1], whole[2], whole[5]), strict=True)
    there = [(name, value) for name, value in found if value is not None]
    return [value for _, value in there], [name for name, _ in there]


def _recurrence(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    weights, names = _weights(inputs)
    states = [x for x in inputs[3:5] if x is not None]

    def step(
        b: Builder, fixed: list[Value], carried: list[Value], parts: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        state = _Cell(b, attrs["kind"], fixed, names).next(parts[0], carried)
        return state, state

    assert inputs[0] is not None
    return scan(b, step, weights, states, [inputs[0]], bool(attrs["reverse"]))[1]


def _recurrence_grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dy, dcells, y, cells = inputs[:4]
    gates, start = inputs[4], inputs[7]
    assert dy is not None and y is not None and gates is not None and start is not None
    weights, names = _weights(inputs[4:])
    lstm, reverse = attrs["kind"] == "lstm", bool(attrs["reverse"])
    last = _one_later(b, start, y, reverse)
    carried, parted = [b.full(0.0, type_of(start))], [dy, gates, last]
    if lstm:
        first = inputs[8]
        assert cells is not None and first is not None
        carried.append(b.full(0.0, type_of(first)))
        parted += [_one_later(b, first, cells, reverse), cells]
        parted += [] if dcells is None else [dcells]
    else:
        parted.append(y)

    def step(
        b: Builder, fixed: list[Value], carried: list[Value], parts: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        cell = _Cell(b, attrs["kind"], fixed, names)
        dh = b.Add(parts[0], carried[0])
        if not lstm:
            return cell.back(dh, *parts[1:])
        dc = carried[1] if len(parts) == 5 else b.Add(carried[1], parts[5])
        on, made = cell.lstm_back(dh, dc, *parts[1:5])
        return on, [*made, dh]

    ends, made = scan(b, step, weights, carried, parted, not reverse)
    dgates, dhidden = made[:2]
    found = [dgates, _outer(b, dhidden, last)]
    if "bias" in names:
        found.append(b.reduce_sum(dhidden, [0, 1], keepdims=False))
    found += ends
    if "projection" in names:
        found.append(_outer(b, made[3], made[2]))
    return found


def _one_later(b: Builder, first: Value, states: Value, reverse: bool) -> Value:
    """The previous state of each step: all states shifted by one step."""
    count = type_of(states).shape[0]
    start = b.unsqueeze(first, [0])
    if count == 1:
        return start
    if reverse:
        return b.Concat(b.slice(states, 0, 1, count), start, axis=0)
    return b.Concat(start, b.slice(states, 0, 0, count - 1), axis=0)


def _outer(b: Builder, x: Value, y: Value) -> Value:
    """The product of f[T,N,K] and f[T,N,M], summed over steps and samples: f[K,M]."""
    flat = [b.reshape(v, (product(type_of(v).shape[:2]), type_of(v).shape[2])) for v in (x, y)]
    return b.MatMul(b.transpose(flat[0], [1, 0]), flat[1])


def _slope_of_sigmoid(b: Builder, y: Value) -> Value:
    return b.Mul(y, b.Sub(1.0, y))


def _slope_of_tanh(b: Builder, y: Value) -> Value:
    return b.Sub(1.0, b.Mul(y, y))


def _check(call: Call, first: int) -> None:
    """Raises ValueError where the inputs from `first` on do not fit a layer."""
    kind = call.attrs["kind"]
    present = [call.present(first + i) for i in range(6)]
    if kind not in GATES or not (present[0] and present[1] and present[3]):
        raise ValueError(f"{call.op_type} of kind {kind}: gates, weights and a state")
    if present[4] != (kind == "lstm") or (present[5] and kind != "lstm"):
        raise ValueError(f"{call.op_type} of kind {kind}: an LSTM alone has cells")
    steps, batch, width = call.shape(first)
    hidden, inner = call.shape(first + 1)
    size = call.shape(first + 4)[1] if present[4] else inner
    want = {
        1: (product((GATES[kind], size)), inner), 2: (hidden,), 3: (batch, inner),
        4: (batch, size), 5: (inner, size),
    }  # fmt: skip
    for i, shape in want.items():
        if present[i] and call.shape(first + i) != shape:
            raise ValueError(f"{call.op_type} of kind {kind}: {call.type(first + i)} of {shape}")
    if width != hidden or steps == 0:
        raise ValueError(f"{call.op_type} of kind {kind}: gates {call.type(first)}")


def _infer(call: Call) -> list[Type]:
    _check(call, 0)
    outer = call.shape()[:2]
    made = [call.type().with_shape((*outer, call.shape(1)[1]))]
    return [*made, call.type().with_shape((*outer, call.shape(4)[1]))] if call.present(4) else made


def _infer_grad(call: Call) -> list[Type]:
    _check(call, 4)
    return [call.type(i) for i in range(4, 10) if call.present(i)]


def _products(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    return _flops(inputs, of_state=1, projections=1)


def _products_of_grad(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """FLOPs of the gradient: the forward's, since gates are recomputed from states, and two more
    products."""
    return _flops(inputs[4:], 2 if GATES[attrs["kind"]] == 1 else 3, projections=2)


def _flops(layer: Types, of_state: int, projections: int) -> Size:
    gates, r = layer[:2]
    projection = layer[5] if len(layer) > 5 else None
    assert gates is not None and r is not None
    total = 2 * of_state * product((*gates.shape[:2], *r.shape))
    if projection is not None:
        total = total + 2 * projections * product((*gates.shape[:2], *projection.shape))
    return total


_CASES: tuple[tuple[dict[str, Any], tuple[str | None, ...]], ...] = (
    ({"kind": "lstm", "reverse": 0}, ("f32[3,2,8]", "f32[8,2]", "f32[8]", "f32[2,2]", "f32[2,2]")),
    ({"kind": "lstm", "reverse": 1}, ("f32[3,2,12]", "f32[12,3]", None, "f32[2,3]", "f32[2,3]")),
    (
        {"kind": "lstm", "reverse": 0},
        ("f32[3,2,12]", "f32[12,2]", "f32[12]", "f32[2,2]", "f32[2,3]", "f32[2,3]"),
    ),
    ({"kind": "lstm", "reverse": 0}, ("f32[1,1,4]", "f32[4,1]", "f32[4]", "f32[1,1]", "f32[1,1]")),
    ({"kind": "gru", "reverse": 0}, ("f32[3,2,9]", "f32[9,3]", "f32[9]", "f32[2,3]")),
    ({"kind": "gru", "reverse": 1}, ("f32[4,2,6]", "f32[6,2]", None, "f32[2,2]")),
    ({"kind": "tanh", "reverse": 0}, ("f32[3,2,4]", "f32[4,4]", "f32[4]", "f32[2,4]")),
    ({"kind": "relu", "reverse": 1}, ("f32[3,2,4]", "f32[4,4]", "f32[4]", "f32[2,4]")),
)


def _gradient_cases() -> tuple[tuple[dict[str, Any], tuple[str | None, ...]], ...]:
    """Test cases of the gradient, with a forward's results as inputs."""
    cases = []
    for attrs, types in _CASES:
        steps, batch, _ = types[0].partition("[")[2][:-1].split(",")  # type: ignore[union-attr]
        inner = types[3].partition(",")[2][:-1]  # type: ignore[union-attr]
        y, cells = f"f32[{steps},{batch},{inner}]", None
        if attrs["kind"] == "lstm":
            cells = f"f32[{steps},{batch},{types[4].partition(',')[2]}"  # type: ignore[union-attr]
        cases.append((attrs, (y, None, y, cells, *types)))
        if cells is not None:
            cases.append((attrs, (y, cells, y, cells, *types)))
    return tuple(cases)


OPS = (
    Op(
        name="Recurrence",
        infer=_infer,
        body=_recurrence,
        doc="One direction of a recurrent layer. Gates f[T,N,G*H], what each step brings to them; "
        "weights f[G*H,P] and an optional bias f[G*H] of the state; the first state f[N,P] -> all "
        "states f[T,N,P]. `kind` is tanh, relu (one gate), gru (gates r, z, n) or lstm (i, f, g, "
        "o). Of an lstm the first cell f[N,H] and an optional projection f[P,H] of the states too "
        "-> all cells f[T,N,H]. Otherwise P is H. With `reverse` the last step comes first.",
        cases=_CASES,
        flops=_products,
    ),
    Op(
        name="RecurrenceGrad",
        infer=_infer_grad,
        body=_recurrence_grad,
        doc="The gradients of those inputs of a Recurrence that are present, from the gradients of "
        "its states f[T,N,P] and, optional, cells f[T,N,H], its results and its inputs.",
        cases=_gradient_cases(),
        flops=_products_of_grad,
    ),
)
