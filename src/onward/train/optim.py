"""Optimizers by description, the torch-free spelling: `onward.optim.AdamW(lr=1e-3)`.

A torch optimizer instance says the same and keeps its `param_groups` as the truth; both become
`UpdateGroup`s, which the step graph is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from onward.config import OnwardError
from onward.differentiate import UpdateGroup


@dataclass
class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101). `lr` may be changed between steps."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decoupled: ClassVar[bool] = True


@dataclass
class Adam:
    """Adam (arXiv 1412.6980); weight decay, if any, is added to the gradient."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: ClassVar[bool] = False


@dataclass
class SGD:
    """Stochastic gradient descent, with optional momentum (and Nesterov's form of it)."""

    lr: float = 1e-2
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False


Optimizer = AdamW | Adam | SGD | torch.optim.Optimizer


def to_torch(optimizer: Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The torch optimizer that holds the description's groups; one given is returned as it is.

    Raises OnwardError for a class or setting that has no update op.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        _check(optimizer)
        return optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise OnwardError("no parameter requires a gradient; fix: unfreeze some")
    kinds = {AdamW: torch.optim.AdamW, Adam: torch.optim.Adam, SGD: torch.optim.SGD}
    kind = kinds.get(type(optimizer))
    if kind is None:
        raise OnwardError(
            f"optimizer {type(optimizer).__name__} is not supported; fix: AdamW, Adam or SGD, from "
            "torch.optim or onward.optim"
        )
    made = kind(trained, **vars(optimizer))
    _check(made)
    return made


def _check(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        raise OnwardError(
            f"optimizer {type(optimizer).__name__} is not supported; fix: torch.optim.AdamW, Adam "
            "or SGD"
        )
    for i, group in enumerate(optimizer.param_groups):
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                raise OnwardError(
                    f"{name}=True in parameter group {i} is not supported; fix: leave it off"
                )


def update_group(
    optimizer: torch.optim.Optimizer, index: int, names: tuple[str, ...], start: int = 0
) -> UpdateGroup:
    """The update of one `param_group` over the parameters `names`, counted from `start`."""
    group = optimizer.param_groups[index]
    attrs: dict[str, Any]
    if isinstance(optimizer, torch.optim.SGD):
        attrs = {
            "momentum": float(group["momentum"]),
            "dampening": float(group["dampening"]),
            "weight_decay": float(group["weight_decay"]),
            "nesterov": int(group["nesterov"]),
        }
        slots = ("momentum_buffer",) if group["momentum"] else ()
        return UpdateGroup(index, names, "SGDUpdate", attrs, slots, start)
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get(
        "decoupled_weight_decay", False
    )
    attrs = {
        "beta1": float(group["betas"][0]),
        "beta2": float(group["betas"][1]),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "decoupled": int(decoupled),
    }
    return UpdateGroup(index, names, "AdamUpdate", attrs, ("exp_avg", "exp_avg_sq"), start)


def hyperparameters(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Everything but the learning rates; a change means a new step graph."""
    return tuple(
        (
            len(g["params"]),
            *((k, v) for k, v in sorted(g.items()) if k not in ("params", "lr", "initial_lr")),
        )
        for g in optimizer.param_groups
    )
