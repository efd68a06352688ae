"""Adamax (arXiv 1412.6980, section 7.1), in torch's form.

g <- g + decay p        m <- beta1 m + (1 - beta1) g        u <- max(beta2 u, |g| + eps)
p <- p - lr / (1 - beta1^t) m / u
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import correction, decayed, mixed, one_less, scaled
from onward.graph.ops.optimizers.record import Groups, Optimizer, beta, setting, updated_types
from onward.graph.ops.record import Op

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class Adamax:
    """Adamax: Adam by the largest gradient in place of the mean of squares."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False
    groups: Groups = ()


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The body of Adamax: `p', m', u'`, all of p's type."""
    p, g, m, u, lr, beta1, beta2, eps, decay, step = [x for x in inputs[:10] if x is not None]
    dtype = type_of(p).dtype
    g = decayed(b, p, scaled(b, g, inputs[10] if len(inputs) > 10 else None), decay)
    m = mixed(b, m, g, one_less(b, beta1))
    u = b.Max(b.Mul(u, b.cast(beta2, dtype)), b.Add(b.Abs(g), b.cast(eps, dtype)))
    size = b.cast(b.Div(lr, correction(b, beta1, step)), dtype)
    return [b.Sub(p, b.Mul(b.Div(m, u), size)), m, u]


_P = "f32[4,6]"

_UPDATE = Op(
    name="AdamaxUpdate",
    infer=updated_types(slots=2),
    body=_body,
    doc="p', m', u' of Adamax. Inputs: p f[*], g f[*], m f[*], u f[*], lr, beta1, beta2, eps, "
    "weight decay f64[], step i64[], scale f[]?.",
    cases=tuple(
        ({}, (_P, _P, _P, _P, *("f64[]",) * 5, "i64[]", *scale)) for scale in ((), ("f32[]",))
    ),
)

OPTIMIZERS = (
    Optimizer(
        description=Adamax,
        torch="torch.optim.Adamax",
        update=_UPDATE,
        slots=("exp_avg", "exp_inf"),
        hyperparameters={
            "lr": setting("lr"),
            "beta1": beta(0),
            "beta2": beta(1),
            "eps": setting("eps"),
            "weight_decay": setting("weight_decay"),
        },
        elementwise=True,
    ),
)
