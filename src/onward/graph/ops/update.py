"""Optimizer updates: `(p, g, state..., hyperparameters..., step, scale) -> (p', state'...)`.

Hyperparameters are f64[], as in `torch.optim`, where they are Python numbers that a schedule may
move: lr, beta1, beta2, eps, weight_decay of Adam; lr, momentum, dampening, weight_decay of SGD.
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
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import DType, Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _rest(b: Builder, x: Value) -> Value:
    """`1 - x`."""
    return b.Sub(np.array(1.0), x)


def _correction(b: Builder, beta: Value, step: Value) -> Value:
    """`1 - beta^step` as f64[]."""
    return _rest(b, b.Pow(beta, b.cast(step, DType.DOUBLE)))


def _scaled(b: Builder, g: Value, scale: Value | None) -> Value:
    return g if scale is None else b.Mul(g, b.cast(scale, type_of(g).dtype))


def _adam(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    scale = inputs[10] if len(inputs) > 10 else None
    p, g, m, v, lr, beta1, beta2, eps, decay, step = [x for x in inputs[:10] if x is not None]
    dtype = type_of(p).dtype

    def near(x: Value) -> Value:
        """The scalar in the parameter's precision."""
        return b.cast(x, dtype)

    g = _scaled(b, g, scale)
    if attrs["decoupled"]:
        p = b.Mul(p, near(_rest(b, b.Mul(lr, decay))))
    else:
        g = b.Add(g, b.Mul(p, near(decay)))
    m = b.Add(b.Mul(m, near(beta1)), b.Mul(g, near(_rest(b, beta1))))
    v = b.Add(b.Mul(v, near(beta2)), b.Mul(b.Mul(g, g), near(_rest(b, beta2))))
    size = near(b.Div(lr, _correction(b, beta1, step)))
    root = near(b.Sqrt(_correction(b, beta2, step)))
    denominator = b.Add(b.Div(b.Sqrt(v), root), near(eps))
    return [b.Sub(p, b.Mul(size, b.Div(m, denominator))), m, v]


def _sgd(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    velocity, scale = inputs[2], inputs[8] if len(inputs) > 8 else None
    p, g, lr, momentum, dampening, decay, step = [
        x for x in (*inputs[:2], *inputs[3:8]) if x is not None
    ]
    dtype = type_of(p).dtype
    g = b.Add(_scaled(b, g, scale), b.Mul(p, b.cast(decay, dtype)))
    state: list[Value] = []
    if velocity is not None:
        kept = b.cast(momentum, dtype)
        moved = b.Add(b.Mul(velocity, kept), b.Mul(g, b.cast(_rest(b, dampening), dtype)))
        velocity = b.Where(b.Equal(step, np.array(1, dtype=np.int64)), g, moved)
        state = [velocity]
        g = b.Add(g, b.Mul(velocity, kept)) if attrs["nesterov"] else velocity
    return [b.Sub(p, b.Mul(b.cast(lr, dtype), g)), *state]


def _infer_adam(call: Call) -> list[Type]:
    return [call.type(0), call.type(2), call.type(3)]


def _infer_sgd(call: Call) -> list[Type]:
    return [call.type(0), call.type(2)] if call.present(2) else [call.type(0)]


_P = "f32[4,6]"
_ADAM = ("f64[]",) * 5 + ("i64[]",)
_SGD = ("f64[]",) * 4 + ("i64[]",)

OPS = (
    Op(
        name="AdamUpdate",
        infer=_infer_adam,
        body=_adam,
        doc="p', m', v' of Adam (weight decay added to g) or, with decoupled=1, AdamW (p shrunk by "
        "lr * decay).",
        cases=tuple(
            ({"decoupled": decoupled}, (_P, _P, _P, _P, *_ADAM, *scale))
            for decoupled in (1, 0)
            for scale in ((), ("f32[]",))
        ),
    ),
    Op(
        name="SGDUpdate",
        infer=_infer_sgd,
        body=_sgd,
        doc="p', velocity' of SGD; no velocity where momentum is 0.",
        cases=tuple(
            ({"nesterov": nesterov}, (_P, _P, velocity, *_SGD, *scale))
            for nesterov, velocity in ((0, None), (0, _P), (1, _P))
            for scale in ((), ("f32[]",))
        ),
    ),
)
