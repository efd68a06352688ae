"""Lion (Chen et al., 2023, arXiv 2302.06675): the sign of an interpolated momentum.

p <- p - lr (sign(beta1 m + (1 - beta1) g) + decay p)          m <- beta2 m + (1 - beta2) g
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onward.extend import (
    Builder,
    Op,
    Optimizer,
    Value,
    one_less,
    scaled,
    setting,
    type_of,
    updated_types,
)


@dataclass
class Lion:
    """Lion; `onward.optim.Lion` where this package is installed."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """`p'` and the momentum', of p's type."""
    p, g, m, lr, beta1, beta2, decay, _ = [x for x in inputs[:8] if x is not None]
    dtype = type_of(p).dtype
    g = scaled(b, g, inputs[8] if len(inputs) > 8 else None)

    def mixed(beta: Value) -> Value:
        return b.Add(b.Mul(m, b.cast(beta, dtype)), b.Mul(g, b.cast(one_less(b, beta), dtype)))

    direction = b.Add(b.Sign(mixed(beta1)), b.Mul(p, b.cast(decay, dtype)))
    return [b.Sub(p, b.Mul(b.cast(lr, dtype), direction)), mixed(beta2)]


LION = Optimizer(
    description=Lion,
    torch="onward_example.torch_lion.Lion",
    update=Op(
        name="LionUpdate",
        infer=updated_types(slots=1),
        body=_body,
        doc="p', momentum' of Lion.",
        cases=tuple(
            ({}, ("f32[4,6]",) * 3 + ("f64[]",) * 4 + ("i64[]",) + scale)
            for scale in ((), ("f32[]",))
        ),
    ),
    slots=("exp_avg",),
    hyperparameters={
        "lr": setting("lr"),
        "beta1": lambda group: group["betas"][0],
        "beta2": lambda group: group["betas"][1],
        "weight_decay": setting("weight_decay"),
    },
    counted=False,  # the torch class keeps no count of steps
)
