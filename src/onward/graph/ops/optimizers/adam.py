"""Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101): two records over one op, as in torch.

g <- g + decay p  (Adam)      p <- (1 - lr decay) p  (AdamW)
m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
p <- p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import correction, one_less, scaled
from onward.graph.ops.optimizers.record import Group, Optimizer, setting, updated_types
from onward.graph.ops.record import Op

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101). `lr` may be changed between steps."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass
class Adam:
    """Adam (arXiv 1412.6980); weight decay, if any, is added to the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


def _adam(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """`p', m', v'`; all of p's type."""
    scale = inputs[10] if len(inputs) > 10 else None
    p, g, m, v, lr, beta1, beta2, eps, decay, step = [x for x in inputs[:10] if x is not None]
    dtype = type_of(p).dtype

    def near(x: Value) -> Value:
        """The scalar in the parameter's precision."""
        return b.cast(x, dtype)

    g = scaled(b, g, scale)
    if attrs["decoupled"]:
        p = b.Mul(p, near(one_less(b, b.Mul(lr, decay))))
    else:
        g = b.Add(g, b.Mul(p, near(decay)))
    m = b.Add(b.Mul(m, near(beta1)), b.Mul(g, near(one_less(b, beta1))))
    v = b.Add(b.Mul(v, near(beta2)), b.Mul(b.Mul(g, g), near(one_less(b, beta2))))
    size = near(b.Div(lr, correction(b, beta1, step)))
    root = near(b.Sqrt(correction(b, beta2, step)))
    denominator = b.Add(b.Div(b.Sqrt(v), root), near(eps))
    return [b.Sub(p, b.Mul(size, b.Div(m, denominator))), m, v]


_P = "f32[4,6]"
_SCALARS = ("f64[]",) * 5 + ("i64[]",)

_UPDATE = Op(
    name="AdamUpdate",
    infer=updated_types(slots=2),
    body=_adam,
    doc="p', m', v' of Adam (weight decay added to g) or, with decoupled=1, AdamW (p shrunk by "
    "lr * decay).",
    cases=tuple(
        ({"decoupled": decoupled}, (_P, _P, _P, _P, *_SCALARS, *scale))
        for decoupled in (1, 0)
        for scale in ((), ("f32[]",))
    ),
)
_HYPERPARAMETERS = {
    "lr": setting("lr"),
    "beta1": lambda group: group["betas"][0],
    "beta2": lambda group: group["betas"][1],
    "eps": setting("eps"),
    "weight_decay": setting("weight_decay"),
}


def _of(description: type[Any], decoupled: bool) -> Optimizer:
    def attributes(group: Group) -> dict[str, Any]:
        return {"decoupled": int(group.get("decoupled_weight_decay", decoupled))}

    name = description.__name__
    slots = ("exp_avg", "exp_avg_sq")
    return Optimizer(
        description, f"torch.optim.{name}", _UPDATE, slots, _HYPERPARAMETERS, attributes
    )


OPTIMIZERS = (_of(AdamW, decoupled=True), _of(Adam, decoupled=False))
