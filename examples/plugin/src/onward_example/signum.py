"""Signum (Bernstein et al., 2018, arXiv 1802.04434): the sign of a momentum.

m <- beta m + (1 - beta) g                       p <- p - lr (sign(m) + decay p)
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
class Signum:
    """Signum; `onward.optim.Signum` where this package is installed."""

    lr: float = 1e-4
    beta: float = 0.9
    weight_decay: float = 0.0


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """`p'` and the momentum', of p's type."""
    p, g, m, lr, beta, decay, _ = [x for x in inputs[:7] if x is not None]
    dtype = type_of(p).dtype
    g = scaled(b, g, inputs[7] if len(inputs) > 7 else None)
    m = b.Add(b.Mul(m, b.cast(beta, dtype)), b.Mul(g, b.cast(one_less(b, beta), dtype)))
    direction = b.Add(b.Sign(m), b.Mul(p, b.cast(decay, dtype)))
    return [b.Sub(p, b.Mul(b.cast(lr, dtype), direction)), m]


SIGNUM = Optimizer(
    description=Signum,
    torch="onward_example.torch_signum.Signum",
    update=Op(
        name="SignumUpdate",
        infer=updated_types(slots=1),
        body=_body,
        doc="p', momentum' of Signum.",
        cases=tuple(
            ({}, ("f32[4,6]",) * 3 + ("f64[]",) * 3 + ("i64[]",) + scale)
            for scale in ((), ("f32[]",))
        ),
    ),
    slots=("exp_avg",),
    hyperparameters={
        "lr": setting("lr"),
        "beta": setting("beta"),
        "weight_decay": setting("weight_decay"),
    },
    counted=False,  # the torch class keeps no count of steps
)
