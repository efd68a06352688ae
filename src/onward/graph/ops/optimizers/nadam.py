"""NAdam (Incorporating Nesterov Momentum into Adam, Dozat, 2016), in torch's form.

g <- g + decay p, or p <- (1 - lr decay) p  (decoupled)
m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
mu(t) = beta1 (1 - 0.96^(t momentum_decay) / 2)         product <- product mu(t)
p <- p - lr (1 - mu(t)) / (1 - product) g / d - lr mu(t+1) / (1 - product mu(t+1)) m / d,
d = sqrt(v / (1 - beta2^t)) + eps
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
from onward.graph.types import DType, Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class NAdam:
    """Adam with Nesterov's momentum (Dozat, 2016)."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    maximize: bool = False
    groups: Groups = ()


def _momentum(b: Builder, beta1: Value, decay: Value, time: Value) -> Value:
    """The share of momentum in an update, f64[]; time: the update's number."""
    fallen = b.Mul(b.Pow(np.array(0.96), b.Mul(time, decay)), np.array(0.5))
    return b.Mul(beta1, one_less(b, fallen))


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The body of NAdam: `p', product', m', v'`; the product is f32[], the others of p's type."""
    given = [x for x in inputs[:12] if x is not None]
    p, g, product, m, v, lr, beta1, beta2, eps, decay, slowing, step = given
    dtype, kept = type_of(p).dtype, type_of(product).dtype
    g = scaled(b, g, inputs[12] if len(inputs) > 12 else None)
    p, g = weight_decayed(b, p, g, lr, decay, attrs["decoupled"])
    time = b.cast(step, DType.DOUBLE)
    now = _momentum(b, beta1, slowing, time)
    following = _momentum(b, beta1, slowing, b.Add(time, np.array(1.0)))
    # rounded at each update, as torch keeps it
    product = b.cast(b.Mul(b.cast(product, DType.DOUBLE), now), kept)
    wide = b.cast(product, DType.DOUBLE)
    m = mixed(b, m, g, one_less(b, beta1))
    v = second_moment(b, v, g, beta2)
    root = b.Sqrt(b.Div(v, b.cast(correction(b, beta2, step), dtype)))
    divisor = b.Add(root, b.cast(eps, dtype))
    of_g = b.Div(b.Mul(lr, one_less(b, now)), one_less(b, wide))
    of_m = b.Div(b.Mul(lr, following), one_less(b, b.Mul(wide, following)))
    moved = b.Add(b.Mul(g, b.cast(of_g, dtype)), b.Mul(m, b.cast(of_m, dtype)))
    return [b.Sub(p, b.Div(moved, divisor)), product, m, v]


def _one_number(parameter: Type) -> Type:
    """The type of the product: f32[], whatever the parameter's."""
    return Type(DType.FLOAT, ())


_P = "f32[4,6]"

_UPDATE = Op(
    name="NAdamUpdate",
    infer=updated_types(slots=3),
    body=_body,
    doc="p', product', m', v' of NAdam; decoupled=1: weight decay shrinks p, else it is added to "
    "g. Inputs: p f[*], g f[*], product f32[], m f[*], v f[*], lr, beta1, beta2, eps, weight decay "
    "and momentum decay f64[], step i64[], scale f[]?.",
    cases=tuple(
        ({"decoupled": flag}, (_P, _P, "f32[]", _P, _P, *("f64[]",) * 6, "i64[]", *scale))
        for flag in (0, 1)
        for scale in ((), ("f32[]",))
    ),
)


OPTIMIZERS = (
    Optimizer(
        description=NAdam,
        torch="torch.optim.NAdam",
        update=_UPDATE,
        slots=("mu_product", "exp_avg", "exp_avg_sq"),
        hyperparameters={
            "lr": setting("lr"),
            "beta1": beta(0),
            "beta2": beta(1),
            "eps": setting("eps"),
            "weight_decay": setting("weight_decay"),
            "momentum_decay": setting("momentum_decay"),
        },
        attributes=decoupled,
        types={"mu_product": _one_number},
        starts={"mu_product": lambda group: 1.0},
        elementwise=True,
    ),
)
