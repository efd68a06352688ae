"""Lion (Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675, program 1).

u <- sign(beta1 m + (1 - beta1) g)
p <- p - lr (u + decay p)          m <- beta2 m + (1 - beta2) g

torch has no Lion; `onward.train.eager_optimizers` has one with torch's interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import mixed, one_less, scaled, shrunk
from onward.graph.ops.optimizers.record import Groups, Optimizer, beta, setting, updated_types
from onward.graph.ops.record import Op

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class Lion:
    """Lion (arXiv 2302.06675): steps of one size, by the sign of an average of gradients. The paper
    advises a `lr` 3 to 10 times smaller than AdamW's, and a weight decay larger by the same."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False
    groups: Groups = ()


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The body of Lion: `p', m'`, both of p's type."""
    p, g, m, lr, beta1, beta2, decay, _ = [x for x in inputs[:8] if x is not None]
    g = scaled(b, g, inputs[8] if len(inputs) > 8 else None)
    sign = b.Sign(mixed(b, m, g, one_less(b, beta1)))
    moved = b.Sub(shrunk(b, p, lr, decay), b.Mul(sign, b.cast(lr, type_of(p).dtype)))
    return [moved, mixed(b, m, g, one_less(b, beta2))]


_P = "f32[4,6]"

_UPDATE = Op(
    name="LionUpdate",
    infer=updated_types(slots=1),
    body=_body,
    doc="p', m' of Lion. Inputs: p f[*], g f[*], m f[*], lr, beta1, beta2, weight decay f64[], "
    "step i64[], scale f[]?.",
    cases=tuple(({}, (_P, _P, _P, *("f64[]",) * 4, "i64[]", *scale)) for scale in ((), ("f32[]",))),
)

OPTIMIZERS = (
    Optimizer(
        description=Lion,
        torch="onward.train.eager_optimizers.EagerLion",
        update=_UPDATE,
        slots=("exp_avg",),
        hyperparameters={
            "lr": setting("lr"),
            "beta1": beta(0),
            "beta2": beta(1),
            "weight_decay": setting("weight_decay"),
        },
        counted=False,
        elementwise=True,
    ),
)
