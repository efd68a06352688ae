"""Optimizers: the torch-free spelling `onward.optim.AdamW(lr=1e-3)`, and torch's own.

Both become `UpdateGroup`s, from which the step graph is made; a torch optimizer keeps its
`param_groups`, which stay authoritative. The graph holds the update rule; hyperparameters are its
inputs, read from the groups before each update. `graph/ops/optimizers` has a record of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

import torch

from onward.differentiate import UpdateGroup
from onward.errors import OnwardError
from onward.extend import load_plugins
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.ops.optimizers import Optimizer as Record
from onward.graph.ops.optimizers.adafactor import Adafactor
from onward.graph.ops.optimizers.adagrad import Adagrad
from onward.graph.ops.optimizers.adam import Adam, AdamW
from onward.graph.ops.optimizers.adamax import Adamax
from onward.graph.ops.optimizers.lamb import LAMB
from onward.graph.ops.optimizers.lion import Lion
from onward.graph.ops.optimizers.muon import Muon
from onward.graph.ops.optimizers.muon_adamw import MuonWithAdamW
from onward.graph.ops.optimizers.nadam import NAdam
from onward.graph.ops.optimizers.radam import RAdam
from onward.graph.ops.optimizers.rmsprop import RMSprop
from onward.graph.ops.optimizers.sgd import SGD
from onward.train.layerwise import layerwise_decay
from onward.train.parameter_groups import param_groups, split

Optimizer: TypeAlias = "torch.optim.Optimizer | object"  # or a description: AdamW(lr=1e-3)


def __getattr__(name: str) -> Any:
    """Looks up the description class of an optimizer that a plugin has added."""
    if name not in OPTIMIZERS and not name.startswith("_"):
        load_plugins()
    if name in OPTIMIZERS:
        return OPTIMIZERS[name].description
    raise AttributeError(f"onward.optim has no optimizer {name}")


def record_of(optimizer: torch.optim.Optimizer) -> Record:
    """The record of an optimizer's class. Raises OnwardError for a class without one, which
    includes subclasses of those that have one."""
    for record in OPTIMIZERS.values():
        if type(optimizer) is _class(record.torch):
            return record
    raise OnwardError(
        f"optimizer {type(optimizer).__name__} is not supported; fix: one of "
        f"{', '.join(record.said for record in OPTIMIZERS.values())}"
    )


@cache
def _class(path: str) -> Any:
    """Imports the class of a dotted name; None where its package is not installed."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def to_torch(optimizer: Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Makes a torch optimizer of a description; returns a torch optimizer as it is.

    Raises OnwardError for any other object.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise OnwardError("no parameter requires grad; fix: requires_grad_(True) on those to train")
    record = next((r for r in OPTIMIZERS.values() if type(optimizer) is r.description), None)
    kind = None if record is None else _class(record.torch)
    if record is None or kind is None:
        raise OnwardError(
            f"optimizer {type(optimizer).__name__} is not supported; fix: "
            f"{', '.join(OPTIMIZERS)}, from torch.optim or onward.optim"
        )
    given = vars(optimizer).items()
    settings = {name: value for name, value in given if name not in record.own_fields}
    groups = param_groups(model, getattr(optimizer, "groups", ()), settings)
    settings_of = getattr(optimizer, "settings_of", None)
    return kind(groups if settings_of is None else split(model, groups, settings_of), **settings)


def check_settings(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raises OnwardError for a setting without an update op, in any of these parameter groups."""
    record = record_of(optimizer)
    for i, group in enumerate(groups):
        for name in record.refused:
            if group.get(name):
                raise OnwardError(
                    f"{name}=True in parameter group {i} is not supported; fix: {name}=False"
                )


def check_parameters(
    optimizer: torch.optim.Optimizer, known: Mapping[torch.Tensor, str], model: str
) -> None:
    """Raises OnwardError where the optimizer holds a tensor that is not a parameter of this model,
    or one parameter twice.

    known: the names of parameters that belong to the model, or did.
    """
    held = [p for g in optimizer.param_groups for p in g["params"]]
    strange = [p for p in held if p not in known and p.requires_grad]
    if strange:
        raise OnwardError(
            f"{len(strange)} of the {len(held)} tensors in the optimizer are not parameters "
            f"of this {model} (the first has shape {list(strange[0].shape)}); fix: make the "
            "optimizer from the model's own parameters()"
        )
    twice = next((p for p, n in Counter(held).items() if n > 1), None)
    if twice is not None:
        raise OnwardError(
            f"the optimizer holds parameter '{known.get(twice, '?')}' twice; fix: list it in one "
            "group"
        )


def update_group(
    optimizer: torch.optim.Optimizer,
    index: int,
    names: tuple[str, ...],
    clock: int = 0,
    form: str = "",
    slots: tuple[str, ...] = (),
) -> UpdateGroup:
    """Describes the update of one `param_group`. names: its parameters, as graph inputs. clock: the
    count of updates that they share. form and slots: of their state."""
    group = optimizer.param_groups[index]
    record = record_of(optimizer).of(group)
    attributes, maximize = record.attributes(group), bool(group.get("maximize"))
    return UpdateGroup(index, names, record, attributes, slots, clock, form, maximize)


def hyperparameters(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, float]:
    """The hyperparameters of a group that a schedule may change between updates."""
    return record_of(optimizer).of(group).values(group)


def rules(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> tuple[Any, ...]:
    """The part of these parameter groups that a step graph is built from; a change requires a new
    graph."""
    record = record_of(optimizer)
    return tuple(
        (
            tuple(map(id, g["params"])),
            str(record.of(g).attributes(g)),
            tuple(slot for slot in record.slots if record.kept(g, slot)),
            bool(g.get("maximize")),
        )
        for g in groups
    )


__all__ = [
    "LAMB",
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "Muon",
    "MuonWithAdamW",
    "NAdam",
    "RAdam",
    "RMSprop",
    "layerwise_decay",
]
