"""LAMB (Large Batch Optimization for Deep Learning, arXiv 1904.00962, algorithm 2).

m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
u = m / c1 / (sqrt(v / c2) + eps) + decay p,      ci = 1 - beta_i^t, or 1 without bias correction
p <- p - lr min(max(|p| / |u|, ratio_min), ratio_max) u

Norms are of one parameter as a vector; where one of them is 0, the ratio is 1. A group with
`adapt=False` has ratio 1, as biases and gains of norms in BERT's pre-training. torch has no LAMB;
`onward.train.eager_optimizers` has one with torch's interface.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import (
    correction,
    decayed,
    mixed,
    one_less,
    scaled,
    second_moment,
)
from onward.graph.ops.optimizers.record import (
    Group,
    Groups,
    Optimizer,
    beta,
    setting,
    updated_types,
)
from onward.graph.ops.record import Op
from onward.graph.types import DType

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class LAMB:
    """LAMB (arXiv 1904.00962): AdamW whose step is scaled to each parameter's norm. `ratio_min` and
    `ratio_max` limit the factor; `adapt=False`, in a group, leaves it out."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    adapt: bool = True
    ratio_min: float = 0.0
    ratio_max: float = math.inf
    maximize: bool = False
    groups: Groups = ()


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The body of LAMB: `p', m', v'`, all of p's type."""
    given = [x for x in inputs[:12] if x is not None]
    p, g, m, v, lr, beta1, beta2, eps, decay, low, high, step = given
    dtype = type_of(p).dtype
    g = scaled(b, g, inputs[12] if len(inputs) > 12 else None)
    m = mixed(b, m, g, one_less(b, beta1))
    v = second_moment(b, v, g, beta2)
    first, second = m, v
    if attrs["bias_correction"]:
        first = b.Div(m, b.cast(correction(b, beta1, step), dtype))
        second = b.Div(v, b.cast(correction(b, beta2, step), dtype))
    u = b.Div(first, b.Add(b.Sqrt(second), b.cast(eps, dtype)))
    u = decayed(b, p, u, decay)
    rate = lr
    if attrs["adapt"]:
        size, step_size = (b.cast(b.ReduceL2(x, keepdims=0), DType.DOUBLE) for x in (p, u))
        zero, one = np.array(0.0), np.array(1.0)
        whole = b.And(b.Greater(size, zero), b.Greater(step_size, zero))
        ratio = b.Div(size, b.Where(whole, step_size, one))
        limited = b.Min(b.Max(ratio, low), high)
        rate = b.Mul(lr, b.Where(whole, limited, one))
    return [b.Sub(p, b.Mul(u, b.cast(rate, dtype))), m, v]


_P = "f32[4,6]"

_UPDATE = Op(
    name="LAMBUpdate",
    infer=updated_types(slots=2),
    body=_body,
    doc="p', m', v' of LAMB. Inputs: p f[*], g f[*], m f[*], v f[*], lr, beta1, beta2, eps, weight "
    "decay, the ratio's least and greatest f64[], step i64[], scale f[]?. adapt=0: ratio 1; "
    "bias_correction=0: moments as they are.",
    cases=tuple(
        (
            {"adapt": adapt, "bias_correction": corrected},
            (_P, _P, _P, _P, *("f64[]",) * 7, "i64[]", *scale),
        )
        for adapt, corrected in ((1, 1), (1, 0), (0, 1))
        for scale in ((), ("f32[]",))
    ),
)


def _attributes(group: Group) -> dict[str, Any]:
    return {name: int(group[name]) for name in ("adapt", "bias_correction")}


OPTIMIZERS = (
    Optimizer(
        description=LAMB,
        torch="onward.train.eager_optimizers.EagerLAMB",
        update=_UPDATE,
        slots=("exp_avg", "exp_avg_sq"),
        hyperparameters={
            "lr": setting("lr"),
            "beta1": beta(0),
            "beta2": beta(1),
            "eps": setting("eps"),
            "weight_decay": setting("weight_decay"),
            "ratio_min": setting("ratio_min"),
            "ratio_max": setting("ratio_max"),
        },
        attributes=_attributes,
    ),
)
