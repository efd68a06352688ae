"""RAdam (arXiv 1908.03265), in torch's form.

g <- g + decay p, or p <- (1 - lr decay) p  (decoupled)
m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
rho_inf = 2 / (1 - beta2) - 1         rho = rho_inf - 2 t beta2^t / (1 - beta2^t)
r = sqrt((rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho))
p <- p - lr m / (1 - beta1^t) r sqrt(1 - beta2^t) / (sqrt(v) + eps)       where rho > 5, else
p <- p - lr m / (1 - beta1^t)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import (
    correction,
    mixed,
    one_less,
    scaled,
    second_moment,
    weight_decayed,
)
from onward.graph.ops.optimizers.record import (
    Groups,
    Optimizer,
    beta,
    decoupled,
    setting,
    updated_types,
)
from onward.graph.ops.record import Op
from onward.graph.types import DType

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class RAdam:
    """Rectified Adam (arXiv 1908.03265): it adapts no rate while the second moment is uncertain."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False
    groups: Groups = ()


def _rectification(b: Builder, beta2: Value, step: Value) -> tuple[Value, Value]:
    """`r sqrt(1 - beta2^t)` f64[], and whether rho is above 5, b[]."""
    number = np.array
    left, t = correction(b, beta2, step), b.cast(step, DType.DOUBLE)
    most = b.Sub(b.Div(number(2.0), one_less(b, beta2)), number(1.0))
    lost = b.Div(b.Mul(b.Mul(t, number(2.0)), one_less(b, left)), left)
    rho = b.Sub(most, lost)

    def product(x: Value) -> Value:
        return b.Mul(b.Sub(x, number(4.0)), b.Sub(x, number(2.0)))

    share = b.Div(b.Mul(product(rho), most), b.Mul(product(most), rho))
    return b.Sqrt(b.Mul(b.Abs(share), left)), b.Greater(rho, number(5.0))


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The body of RAdam: `p', m', v'`, all of p's type."""
    p, g, m, v, lr, beta1, beta2, eps, decay, step = [x for x in inputs[:10] if x is not None]
    dtype = type_of(p).dtype
    g = scaled(b, g, inputs[10] if len(inputs) > 10 else None)
    p, g = weight_decayed(b, p, g, lr, decay, attrs["decoupled"])
    m = mixed(b, m, g, one_less(b, beta1))
    v = second_moment(b, v, g, beta2)
    factor, certain = _rectification(b, beta2, step)
    size = b.cast(b.Div(lr, correction(b, beta1, step)), dtype)
    adapted = b.Div(b.cast(factor, dtype), b.Add(b.Sqrt(v), b.cast(eps, dtype)))
    rate = b.Where(certain, adapted, b.scalar(1.0, dtype))
    return [b.Sub(p, b.Mul(b.Mul(m, size), rate)), m, v]


_P = "f32[4,6]"

_UPDATE = Op(
    name="RAdamUpdate",
    infer=updated_types(slots=2),
    body=_body,
    doc="p', m', v' of RAdam; decoupled=1: weight decay shrinks p, else it is added to g. Inputs: "
    "p f[*], g f[*], m f[*], v f[*], lr, beta1, beta2, eps, weight decay f64[], step i64[], scale "
    "f[]?.",
    cases=tuple(
        ({"decoupled": flag}, (_P, _P, _P, _P, *("f64[]",) * 5, "i64[]", *scale))
        for flag in (0, 1)
        for scale in ((), ("f32[]",))
    ),
)


OPTIMIZERS = (
    Optimizer(
        description=RAdam,
        torch="torch.optim.RAdam",
        update=_UPDATE,
        slots=("exp_avg", "exp_avg_sq"),
        hyperparameters={
            "lr": setting("lr"),
            "beta1": beta(0),
            "beta2": beta(1),
            "eps": setting("eps"),
            "weight_decay": setting("weight_decay"),
        },
        attributes=decoupled,
        elementwise=True,
    ),
)
