"""Stochastic gradient descent with momentum (Sutskever et al., 2013), in torch's form.

g <- g + decay p            u <- g at the first step, then momentum u + (1 - dampening) g
p <- p - lr u               nesterov: p <- p - lr (g + momentum u)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import one_less, scaled
from onward.graph.ops.optimizers.record import Group, Groups, Optimizer, setting, updated_types
from onward.graph.ops.record import Op

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class SGD:
    """Stochastic gradient descent, with optional momentum (and Nesterov's form of it)."""

    lr: float = 1e-2
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    groups: Groups = ()


def _sgd(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The body of SGD: `p'` and, with momentum, `velocity'`; both of p's type."""
    velocity, scale = inputs[2], inputs[8] if len(inputs) > 8 else None
    p, g, lr, momentum, dampening, decay, step = [
        x for x in (*inputs[:2], *inputs[3:8]) if x is not None
    ]
    dtype = type_of(p).dtype
    g = b.Add(scaled(b, g, scale), b.Mul(p, b.cast(decay, dtype)))
    state: list[Value] = []
    if velocity is not None:
        kept = b.cast(momentum, dtype)
        moved = b.Add(b.Mul(velocity, kept), b.Mul(g, b.cast(one_less(b, dampening), dtype)))
        velocity = b.Where(b.Equal(step, np.array(1, dtype=np.int64)), g, moved)
        state = [velocity]
        g = b.Add(g, b.Mul(velocity, kept)) if attrs["nesterov"] else velocity
    return [b.Sub(p, b.Mul(b.cast(lr, dtype), g)), *state]


_P = "f32[4,6]"
_SCALARS = ("f64[]",) * 4 + ("i64[]",)

_UPDATE = Op(
    name="SGDUpdate",
    infer=updated_types(slots=1),
    body=_sgd,
    doc="p', velocity' of SGD; no velocity where momentum is 0.",
    cases=tuple(
        ({"nesterov": nesterov}, (_P, _P, velocity, *_SCALARS, *scale))
        for nesterov, velocity in ((0, None), (0, _P), (1, _P))
        for scale in ((), ("f32[]",))
    ),
)


def _moving(group: Group, slot: str = "") -> bool:
    """`Optimizer.kept` of SGD."""
    return bool(group.get("momentum"))


def _attributes(group: Group) -> dict[str, Any]:
    """`Optimizer.attributes` of SGD; without momentum torch ignores nesterov."""
    return {"nesterov": int(_moving(group) and group["nesterov"])}


OPTIMIZERS = (
    Optimizer(
        description=SGD,
        torch="torch.optim.SGD",
        update=_UPDATE,
        slots=("momentum_buffer",),
        hyperparameters={
            name: setting(name) for name in ("lr", "momentum", "dampening", "weight_decay")
        },
        attributes=_attributes,
        kept=_moving,
        counted=False,  # torch's SGD keeps no count of steps
        elementwise=True,
    ),
)
