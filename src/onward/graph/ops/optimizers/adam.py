"""Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101): two records over one op, as in torch.

g <- g + decay p  (Adam)      p <- (1 - lr decay) p  (AdamW)
m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
p <- p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

With `amsgrad` (On the Convergence of Adam and Beyond, Reddi et al., 2018), v's largest value so far
is in the place of v in the last line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.ops.optimizers.adam_low import FORMS
from onward.graph.ops.optimizers.adam_rule import adam
from onward.graph.ops.optimizers.record import (
    Group,
    Groups,
    Optimizer,
    beta,
    setting,
    updated_types,
)
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
    amsgrad: bool = False
    maximize: bool = False
    groups: Groups = ()


@dataclass
class Adam:
    """Adam (arXiv 1412.6980); weight decay, if any, is added to the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    groups: Groups = ()


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    moving, most = [x for x in inputs[:4] if x is not None], inputs[4]
    scalars = [x for x in inputs[5:11] if x is not None]
    scale = inputs[11] if len(inputs) > 11 else None
    return adam(b, moving, scalars, scale, attrs["decoupled"], most)


_MOST = "max_exp_avg_sq"
_P = "f32[4,6]"
_SCALARS = ("f64[]",) * 5 + ("i64[]",)

_UPDATE = Op(
    name="AdamUpdate",
    infer=updated_types(slots=3),
    body=_body,
    doc="p', m', v' of Adam (weight decay added to g) or, with decoupled=1, AdamW (p shrunk by "
    "lr * decay). With a third slot, the largest v so far, also most' (AMSGrad).",
    cases=tuple(
        ({"decoupled": decoupled}, (_P, _P, _P, _P, most, *_SCALARS, *scale))
        for decoupled, most in ((1, None), (0, None), (1, _P))
        for scale in ((), ("f32[]",))
    ),
)
_HYPERPARAMETERS = {
    "lr": setting("lr"),
    "beta1": beta(0),
    "beta2": beta(1),
    "eps": setting("eps"),
    "weight_decay": setting("weight_decay"),
}


def _of(description: type[Any], decoupled: bool) -> Optimizer:
    def attributes(group: Group) -> dict[str, Any]:
        return {"decoupled": int(group.get("decoupled_weight_decay", decoupled))}

    name = description.__name__
    return Optimizer(
        description,
        f"torch.optim.{name}",
        _UPDATE,
        ("exp_avg", "exp_avg_sq", _MOST),
        _HYPERPARAMETERS,
        attributes,
        kept=_kept,
        forms=FORMS,
        plain=_plain,
        refused=("differentiable",),
        elementwise=True,
    )


def _kept(group: Group, slot: str) -> bool:
    return slot != _MOST or bool(group.get("amsgrad"))


def _plain(group: Group) -> str:
    return "amsgrad=True" if group.get("amsgrad") else ""


ADAMW = _of(AdamW, decoupled=True)
OPTIMIZERS = (ADAMW, _of(Adam, decoupled=False))
