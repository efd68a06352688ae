"""RMSprop (Hinton, 2012, lecture 6e), in torch's form; centered as in arXiv 1308.0850.

g <- g + decay p             v <- alpha v + (1 - alpha) g^2
a <- alpha a + (1 - alpha) g          (centered)          d <- sqrt(v - a^2) + eps, or sqrt(v) + eps
u <- momentum u + g / d               (with momentum)     p <- p - lr u, or p - lr g / d
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import decayed, mixed, one_less, scaled, second_moment
from onward.graph.ops.optimizers.record import Group, Groups, Optimizer, setting, updated_types
from onward.graph.ops.record import Op

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class RMSprop:
    """RMSprop, with optional momentum, and optionally by the gradient's variance (`centered`)."""

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False
    groups: Groups = ()


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The body of RMSprop: `p', v'` and, where they are kept, `u'` and `a'`; all of p's type."""
    velocity, average, scale = inputs[3], inputs[4], inputs[11] if len(inputs) > 11 else None
    p, g, v, lr, alpha, eps, decay, momentum, _ = [
        x for x in (*inputs[:3], *inputs[5:11]) if x is not None
    ]
    dtype = type_of(p).dtype
    g = decayed(b, p, scaled(b, g, scale), decay)
    v = second_moment(b, v, g, alpha)
    spread, kept = v, []
    if average is not None:
        average = mixed(b, average, g, one_less(b, alpha))
        spread, kept = b.Sub(v, b.Mul(average, average)), [average]
    step = b.Div(g, b.Add(b.Sqrt(spread), b.cast(eps, dtype)))
    if velocity is not None:
        step = b.Add(b.Mul(velocity, b.cast(momentum, dtype)), step)
        kept = [step, *kept]
    return [b.Sub(p, b.Mul(step, b.cast(lr, dtype))), v, *kept]


_P = "f32[4,6]"

_UPDATE = Op(
    name="RMSpropUpdate",
    infer=updated_types(slots=3),
    body=_body,
    doc="p', v', velocity', average' of RMSprop; no velocity without momentum, no average unless "
    "centered. Inputs: p f[*], g f[*], v f[*], velocity f[*]?, average f[*]?, lr, alpha, eps, "
    "weight decay, momentum f64[], step i64[], scale f[]?.",
    cases=tuple(
        ({}, (_P, _P, _P, velocity, average, *("f64[]",) * 5, "i64[]", *scale))
        for velocity, average in ((None, None), (_P, None), (None, _P), (_P, _P))
        for scale in ((), ("f32[]",))
    ),
)


def _kept(group: Group, slot: str) -> bool:
    if slot == "momentum_buffer":
        return group.get("momentum", 0.0) > 0
    return slot != "grad_avg" or bool(group.get("centered"))


OPTIMIZERS = (
    Optimizer(
        description=RMSprop,
        torch="torch.optim.RMSprop",
        update=_UPDATE,
        slots=("square_avg", "momentum_buffer", "grad_avg"),
        hyperparameters={
            name: setting(name) for name in ("lr", "alpha", "eps", "weight_decay", "momentum")
        },
        kept=_kept,
        elementwise=True,
    ),
)
