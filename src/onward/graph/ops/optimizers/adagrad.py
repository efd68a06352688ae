"""Adagrad (Duchi et al., JMLR 12, 2011), in torch's form.

g <- g + decay p        s <- s + g^2
p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import decayed, scaled
from onward.graph.ops.optimizers.record import Groups, Optimizer, setting, updated_types
from onward.graph.ops.record import Op
from onward.graph.types import DType

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class Adagrad:
    """Adagrad: each element's step shrinks with the sum of its squared gradients so far."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False
    groups: Groups = ()


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The body of Adagrad: `p', sum'`, both of p's type."""
    p, g, total, lr, slower, decay, eps, step = [x for x in inputs[:8] if x is not None]
    dtype = type_of(p).dtype
    g = decayed(b, p, scaled(b, g, inputs[8] if len(inputs) > 8 else None), decay)
    one = np.array(1.0)
    before = b.Sub(b.cast(step, DType.DOUBLE), one)
    rate = b.cast(b.Div(lr, b.Add(b.Mul(before, slower), one)), dtype)
    total = b.Add(total, b.Mul(g, g))
    return [b.Sub(p, b.Mul(b.Div(g, b.Add(b.Sqrt(total), b.cast(eps, dtype))), rate)), total]


_P = "f32[4,6]"

_UPDATE = Op(
    name="AdagradUpdate",
    infer=updated_types(slots=1),
    body=_body,
    doc="p', sum' of Adagrad. Inputs: p f[*], g f[*], sum f[*], lr, lr_decay, weight decay, eps "
    "f64[], step i64[], scale f[]?.",
    cases=tuple(({}, (_P, _P, _P, *("f64[]",) * 4, "i64[]", *scale)) for scale in ((), ("f32[]",))),
)

OPTIMIZERS = (
    Optimizer(
        description=Adagrad,
        torch="torch.optim.Adagrad",
        update=_UPDATE,
        slots=("sum",),
        hyperparameters={name: setting(name) for name in ("lr", "lr_decay", "weight_decay", "eps")},
        starts={"sum": lambda group: group.get("initial_accumulator_value", 0.0)},
        elementwise=True,
    ),
)
