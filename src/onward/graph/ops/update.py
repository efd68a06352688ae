"""Optimizer updates: `(p, g, state..., lr, step, scale) -> (p', state'...)`.

An optional `scale` f[] multiplies g first: the factor of gradient clipping.

Pure as ops; the plan makes them in place.

Formulas are those of `torch.optim`: AdamW (arXiv 1711.05101), Adam (arXiv 1412.6980), SGD with
momentum (Sutskever et al., 2013). Bias corrections are computed in fp64: in fp32 `1 - 0.999` is
already off by 5e-5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.infer import Call
from onward.graph.ops.record import Op
from onward.graph.types import DType, Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _correction(b: Builder, beta: float, step: Value) -> Value:
    """`1 - beta^step` as f64[]."""
    power = b.Pow(np.array(beta), b.cast(step, DType.DOUBLE))
    return b.Sub(np.array(1.0), power)


def _scaled(b: Builder, g: Value, scale: Value | None) -> Value:
    return g if scale is None else b.Mul(g, b.cast(scale, type_of(g).dtype))


def _adam(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    p, g, m, v, lr, step, scale = [*inputs, None][:7]
    assert p is not None and g is not None and m is not None and v is not None
    assert lr is not None and step is not None
    dtype = type_of(p).dtype
    beta1, beta2 = float(attrs["beta1"]), float(attrs["beta2"])
    decay = float(attrs["weight_decay"])
    rate = b.cast(lr, DType.DOUBLE)
    g = _scaled(b, g, scale)
    if decay and attrs["decoupled"]:
        p = b.Mul(p, b.cast(b.Sub(np.array(1.0), b.Mul(rate, np.array(decay))), dtype))
    elif decay:
        g = b.Add(g, b.Mul(p, decay))
    m = b.Add(b.Mul(m, beta1), b.Mul(g, 1.0 - beta1))
    v = b.Add(b.Mul(v, beta2), b.Mul(b.Mul(g, g), 1.0 - beta2))
    size = b.cast(b.Div(rate, _correction(b, beta1, step)), dtype)
    root = b.cast(b.Sqrt(_correction(b, beta2, step)), dtype)
    denominator = b.Add(b.Div(b.Sqrt(v), root), float(attrs["eps"]))
    return [b.Sub(p, b.Mul(size, b.Div(m, denominator))), m, v]


def _sgd(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    p, g, velocity, lr, step, scale = [*inputs, None][:6]
    assert p is not None and g is not None and lr is not None and step is not None
    dtype = type_of(p).dtype
    g = _scaled(b, g, scale)
    if attrs["weight_decay"]:
        g = b.Add(g, b.Mul(p, float(attrs["weight_decay"])))
    state: list[Value] = []
    if velocity is not None:
        momentum = float(attrs["momentum"])
        moved = b.Add(b.Mul(velocity, momentum), b.Mul(g, 1.0 - float(attrs["dampening"])))
        velocity = b.Where(b.Equal(step, np.array(1, dtype=np.int64)), g, moved)
        state = [velocity]
        g = b.Add(g, b.Mul(velocity, momentum)) if attrs["nesterov"] else velocity
    return [b.Sub(p, b.Mul(b.cast(lr, dtype), g)), *state]


def _infer_adam(call: Call) -> list[Type]:
    return [call.type(0), call.type(2), call.type(3)]


def _infer_sgd(call: Call) -> list[Type]:
    return [call.type(0), call.type(2)] if call.present(2) else [call.type(0)]


_P = "f32[4,6]"
_BETAS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_PLAIN = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0}

OPS = (
    Op(
        name="AdamUpdate",
        infer=_infer_adam,
        body=_adam,
        doc="p', m', v' of Adam (weight decay added to g) or, with decoupled=1, AdamW (p shrunk by "
        "lr * decay).",
        cases=tuple(
            ({**_BETAS, "weight_decay": decay, "decoupled": decoupled},
             (_P, _P, _P, _P, "f32[]", "i64[]", *scale))
            for decay, decoupled in ((0.0, 1), (0.01, 1), (0.01, 0))
            for scale in ((), ("f32[]",))
        ),
    ),
    Op(
        name="SGDUpdate",
        infer=_infer_sgd,
        body=_sgd,
        doc="p', velocity' of SGD; no velocity where momentum is 0.",
        cases=(
            (_PLAIN, (_P, _P, None, "f32[]", "i64[]")),
            ({**_PLAIN, "weight_decay": 0.1}, (_P, _P, None, "f32[]", "i64[]")),
            ({**_PLAIN, "momentum": 0.9}, (_P, _P, _P, "f32[]", "i64[]")),
            ({**_PLAIN, "momentum": 0.9, "dampening": 0.1}, (_P, _P, _P, "f32[]", "i64[]")),
            ({**_PLAIN, "momentum": 0.9, "nesterov": 1}, (_P, _P, _P, "f32[]", "i64[]")),
            ({**_PLAIN, "weight_decay": 0.1}, (_P, _P, None, "f32[]", "i64[]", "f32[]")),
            ({**_PLAIN, "momentum": 0.9}, (_P, _P, _P, "f32[]", "i64[]", "f32[]")),
        ),
    ),
)  # fmt: skip
