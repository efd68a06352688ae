"""Optimizer: all that the rest of the library knows of one, in one record.

`groups` below are torch's `param_groups` (or what stands for them): mappings from the names of
settings to their values. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import Type

Group: TypeAlias = Mapping[str, Any]


def no_attributes(group: Group) -> dict[str, Any]:
    """`Optimizer.attributes` of an op without any."""
    return {}


@dataclass(frozen=True)
class StateForm:
    """State in fewer bytes than the parameter has.

    update: the record of its op, that of `Optimizer.update` with these tensors in the places of the
    slots: `(p, g, tensor..., hyperparameter..., step, seed, scale) -> (p', tensor'...)`. tensors:
    by name in the op's order, each with its type for a parameter's; those of one slot have its
    name, or begin with it. drawn: whether the op draws: then `seed` i64[2] is there, and an
    attribute `site`, a number of the parameter's own.
    """

    update: Op
    tensors: dict[str, Callable[[Type], Type]]
    drawn: bool = False


@dataclass(frozen=True)
class Optimizer:
    """One optimizer.

    description: the torch-free spelling, a dataclass of its settings with their defaults; its name
    is the optimizer's, here and as `onward.optim.<name>`. torch: the class that holds the same
    settings, by its dotted name.

    update: the record of its op,
    `(p, g, slot..., hyperparameter..., step, scale) -> (p', slot'...)`. p, g and the slots have the
    parameter's type, but g may be of less than f32; a slot that a group does not keep is absent;
    hyperparameters are f64[], step i64[] is the update's number from 1, and `scale` f[], optional,
    multiplies g first (the factor of clipping).
    slots: the state tensors by torch's names, in the op's order. kept: whether a group keeps them.
    counted: whether torch keeps a count of steps beside them. hyperparameters: the scalars in the
    op's order, each with how a group says it, so that a schedule may move it between updates.
    attributes: of the op, which a step graph is made of; a change means a new graph.
    forms: how the state can be kept in fewer bytes, by the option's name of it.
    """

    description: type[Any]
    torch: str
    update: Op
    slots: tuple[str, ...]
    hyperparameters: dict[str, Callable[[Group], float]]
    attributes: Callable[[Group], dict[str, Any]] = no_attributes
    kept: Callable[[Group], bool] = bool
    counted: bool = True
    forms: Mapping[str, StateForm] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.description.__name__

    def slots_of(self, group: Group) -> tuple[str, ...]:
        """The state tensors that a parameter of the group has."""
        return self.slots if self.kept(group) else ()

    def tensors(self, form: str, parameter: Type) -> dict[str, Type]:
        """The tensors that hold the slots of a parameter, in a form ("": slot by slot)."""
        if not form:
            return dict.fromkeys(self.slots, parameter)
        return {name: of(parameter) for name, of in self.forms[form].tensors.items()}

    @property
    def updates(self) -> list[Op]:
        """The ops that update a parameter, whatever the form of its state."""
        return [self.update, *(form.update for form in self.forms.values())]

    def values(self, group: Group) -> dict[str, float]:
        """The hyperparameters of a group. Raises KeyError, TypeError or ValueError where it lacks
        one or holds no number."""
        return {name: float(read(group)) for name, read in self.hyperparameters.items()}


def setting(name: str) -> Callable[[Group], float]:
    """The hyperparameter that a group holds under this name."""
    return lambda group: group[name]


def updated_types(slots: int) -> Callable[[Call], list[Type]]:
    """`Op.infer` of an update: the types of the parameter and of the slots that are there."""

    def infer(call: Call) -> list[Type]:
        return [call.type(0), *(call.type(2 + i) for i in range(slots) if call.present(2 + i))]

    return infer


__all__ = ["Group", "Optimizer", "StateForm", "no_attributes", "setting", "updated_types"]
