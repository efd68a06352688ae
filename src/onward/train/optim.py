"""Optimizers by description, the torch-free spelling: `onward.optim.AdamW(lr=1e-3)`.

A torch optimizer instance says the same and keeps its `param_groups` as the truth; both become
`UpdateGroup`s, which the step graph is made of. The graph holds the rule; hyperparameters are its
inputs, read from the groups before each update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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


SUPPORTED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


def to_torch(optimizer: Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The torch optimizer that holds the description's groups; one given is returned as it is.

    Raises OnwardError for a class or setting that has no update op.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        if type(optimizer) not in SUPPORTED:
            raise OnwardError(
                f"optimizer {type(optimizer).__name__} is not supported; fix: torch.optim.AdamW, "
                "Adam or SGD"
            )
        check_settings(optimizer)
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
    return kind(trained, **vars(optimizer))


def check_settings(optimizer: torch.optim.Optimizer) -> None:
    """Raises OnwardError for what has no update op, whenever it was switched on."""
    for i, group in enumerate(optimizer.param_groups):
        for name in ("amsgrad", "maximize", "differentiable"):
            if group.get(name):
                raise OnwardError(
                    f"{name}=True in parameter group {i} is not supported; fix: leave it off"
                )


def check_parameters(
    optimizer: torch.optim.Optimizer, known: Mapping[torch.Tensor, str], model: str
) -> None:
    """Raises OnwardError for parameters that a Trainer of this model would not train.

    known: parameters that are the model's, or were.
    """
    held = [p for g in optimizer.param_groups for p in g["params"]]
    strange = [p for p in held if p not in known and p.requires_grad]
    if strange:
        raise OnwardError(
            f"{len(strange)} of the {len(held)} tensors that the optimizer holds are no parameters "
            f"of this {model} (the first has shape {list(strange[0].shape)}); fix: give it the "
            "parameters of the model that is trained"
        )
    twice = next((p for p, n in Counter(held).items() if n > 1), None)
    if twice is not None:
        raise OnwardError(
            f"the optimizer holds parameter '{known.get(twice, '?')}' twice; fix: list it in one "
            "group"
        )


def update_group(
    optimizer: torch.optim.Optimizer, index: int, names: tuple[str, ...], clock: int = 0
) -> UpdateGroup:
    """The update of one `param_group` over the parameters `names`, counted by `clock`."""
    op, attrs, slots = _rule(optimizer, optimizer.param_groups[index])
    return UpdateGroup(index, names, op, attrs, slots, clock)


def slots_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The names of all tensors that the optimizer may keep for a parameter."""
    sgd = isinstance(optimizer, torch.optim.SGD)
    return ("momentum_buffer",) if sgd else ("exp_avg", "exp_avg_sq")


def hyperparameters(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, float]:
    """What a schedule may move between updates, by the names of `differentiate.update.HYPER`."""
    if isinstance(optimizer, torch.optim.SGD):
        names = ("lr", "momentum", "dampening", "weight_decay")
        return {name: float(group[name]) for name in names}
    beta1, beta2 = group["betas"]
    rest = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
    return {**rest, "beta1": float(beta1), "beta2": float(beta2)}


def rules(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What of the groups a step graph is made of; a change means a new graph."""
    return tuple(
        (tuple(map(id, g["params"])), *map(str, _rule(optimizer, g)))
        for g in optimizer.param_groups
    )


def _rule(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any]
) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Op, attributes and state of a group's update."""
    slots = slots_of(optimizer)
    if isinstance(optimizer, torch.optim.SGD):
        moving = bool(group["momentum"])  # without it torch takes no notice of nesterov
        attrs = {"nesterov": int(moving and group["nesterov"])}
        return "SGDUpdate", attrs, slots if moving else ()
    plain = isinstance(optimizer, torch.optim.AdamW)
    decoupled = group.get("decoupled_weight_decay", plain)
    return "AdamUpdate", {"decoupled": int(decoupled)}, slots
