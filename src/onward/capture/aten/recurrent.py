"""LSTM, GRU and Elman layers: for each layer and direction one product for the inputs of all steps,
and one `Recurrence` over the steps."""

from __future__ import annotations

from typing import Any

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.product import linear
from onward.capture.aten.random import dropped
from onward.graph.graph import Value, type_of


def _recurrent(
    c: AtenCall, x: Value, states: list[Value], weights: list[Value], kind: str, biases: bool,
    layers: int, dropout: float, bidirectional: bool, batch_first: bool,
) -> list[Value]:  # fmt: skip
    x = c.b.transpose(x, [1, 0, 2]) if batch_first else x
    count = type_of(x).shape[0]
    ways = 2 if bidirectional else 1
    each = len(weights) // (layers * ways)
    ends: list[list[Value]] = [[] for _ in states]
    for layer in range(layers):
        made = []
        for way in range(ways):
            place = layer * ways + way
            own = weights[place * each : (place + 1) * each]
            bias, inner = (own[2], own[3]) if biases else (None, None)
            projection = own[-1] if each % 2 else None
            first = [c.b.squeeze(c.b.slice(s, 0, place, place + 1), [0]) for s in states]
            given = [linear(c, x, own[0], bias), own[1], inner, *first]
            given += [projection] if projection is not None else []
            found = c.b.node("Recurrence", given, {"kind": kind, "reverse": way})
            found = [found] if isinstance(found, Value) else list(found)
            last = 0 if way else count - 1
            for end, held in zip(ends, found, strict=True):
                end.append(c.b.slice(held, 0, last, last + 1))
            made.append(found[0])
        x = made[0] if ways == 1 else c.b.Concat(*made, axis=2)
        if dropout > 0.0 and layer < layers - 1:
            x = dropped(c, x, dropout)
    y = c.b.transpose(x, [1, 0, 2]) if batch_first else x
    return [y, *(end[0] if len(end) == 1 else c.b.Concat(*end, axis=0) for end in ends)]


def _cell(
    c: AtenCall, x: Value, state: Any, w: Value, r: Value, bias: Value | None = None,
    inner: Value | None = None,
) -> Value | list[Value]:  # fmt: skip
    """One step: x f[N,I], state f[N,H] (for an LSTM [state, cell]) -> the new state (and cell)."""
    kind = _CELLS[c.node.target._schema.name.split("::")[1]]
    states = state if kind == "lstm" else [state]
    gates = c.b.unsqueeze(linear(c, x, w, bias), [0])
    made = c.b.node("Recurrence", [gates, r, inner, *states], {"kind": kind, "reverse": 0})
    found = [made] if isinstance(made, Value) else made
    apart = [c.b.squeeze(y, [0]) for y in found]
    return apart if kind == "lstm" else apart[0]


_CELLS = {
    "lstm_cell": "lstm", "gru_cell": "gru", "rnn_tanh_cell": "tanh", "rnn_relu_cell": "relu",
}  # fmt: skip
TABLE = table(
    {
        _recurrent: "onward.recurrent.default",
        _cell: " ".join(f"{name}.default" for name in _CELLS),
    }
)
