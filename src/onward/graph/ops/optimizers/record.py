"""Optimizer: everything that the rest of the library knows about an optimizer, in one record.

A `Group` is a `param_group` of torch, or a substitute for one: a mapping from names of settings to
values. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import Type

Group: TypeAlias = Mapping[str, Any]
# `groups` of a description: settings of parameters, which are named by patterns under "params"
Groups: TypeAlias = "Sequence[Group]"


def no_attributes(group: Group) -> dict[str, Any]:
    """`Optimizer.attributes` of an op without attributes."""
    return {}


def every_slot(group: Group, slot: str) -> bool:
    """`Optimizer.kept` of an optimizer whose groups keep all slots."""
    return True


@dataclass(frozen=True)
class StateForm:
    """A form of state that takes fewer bytes than the parameter's precision.

    update: the record of its op, like `Optimizer.update` but with these tensors in place of the
    slots: `(p, g, tensor..., hyperparameter..., step, seed, scale) -> (p', tensor'...)`. tensors:
    by name, in the op's order, the type of each as a function of the parameter's; the tensors of a
    slot have its name or begin with it. drawn: whether the op draws random numbers; it then has an
    input `seed` i64[2] and an attribute `site`, a number for each parameter. block: elements that
    are stored or drawn together, so that a part of a parameter begins with a block.
    """

    update: Op
    tensors: dict[str, Callable[[Type], Type]]
    drawn: bool = False
    block: int = 1


@dataclass(frozen=True)
class Optimizer:
    """One optimizer.

    description: the torch-free spelling, a dataclass of settings with defaults; its name is the
    optimizer's, also in `onward.optim.<name>`. torch: dotted name of the torch class with the same
    settings. update: the record of its op, `(p, g, slot..., hyperparameter..., step, scale) -> (p',
    slot'...)`. p, g and the slots have the parameter's type, except that g may have less precision
    than f32, and slots in `types`. A slot that a group or a parameter does not keep is absent.
    Hyperparameters are f64[]; step, i64[], is the update's number from 1; scale, f[], optional, is
    multiplied into g first (the clipping factor; negative in a group that maximizes). slots: names
    of state tensors as in torch, in the op's order. kept: whether a group keeps a slot. counted:
    whether torch keeps a step count beside them. hyperparameters: names of the scalars, in the op's
    order, each with a function that reads it from a group; a schedule may change them between
    updates. attributes: of the op; a change means a new step graph. forms: forms of the state in
    fewer bytes, by the option's name; plain: why a group has none of them, "" where it has. types:
    the type of a slot as a function of the parameter's, where it is another; None: a parameter of
    this shape has no such slot. starts: a slot's numbers before the first update, where these are
    not 0. refused: settings of a group that have to be false.
    part: the record by which a group is updated, of an optimizer whose groups are updated in
    different ways; its slots are those of all parts. elementwise: whether each element of the
    parameter is updated from its own gradient and state alone, so that ranks may update parts.
    own_fields: fields of the description that say which parameters are in which group, and are no
    settings of the torch class.
    """

    description: type[Any]
    torch: str
    update: Op
    slots: tuple[str, ...]
    hyperparameters: dict[str, Callable[[Group], float]]
    attributes: Callable[[Group], dict[str, Any]] = no_attributes
    kept: Callable[[Group, str], bool] = every_slot
    counted: bool = True
    forms: Mapping[str, StateForm] = field(default_factory=dict)
    plain: Callable[[Group], str] = lambda group: ""
    types: Mapping[str, Callable[[Type], Type | None]] = field(default_factory=dict)
    starts: Mapping[str, Callable[[Group], float]] = field(default_factory=dict)
    refused: tuple[str, ...] = ("differentiable", "amsgrad")
    part: Callable[[Group], Optimizer] | None = None
    elementwise: bool = False
    own_fields: tuple[str, ...] = ("groups",)

    @property
    def name(self) -> str:
        return self.description.__name__

    @property
    def said(self) -> str:
        """The name of its class for messages."""
        return self.torch if not self.torch.startswith("onward.") else f"onward.optim.{self.name}"

    def of(self, group: Group) -> Optimizer:
        """The record by which a group is updated."""
        return self if self.part is None else self.part(group)

    def tensors(self, form: str, parameter: Type) -> dict[str, Type | None]:
        """The tensors that hold a parameter's slots in this form; "": a tensor for each slot, None
        for one that a parameter of this shape lacks."""
        if not form:
            types = self.types
            return {s: types[s](parameter) if s in types else parameter for s in self.slots}
        return {name: of(parameter) for name, of in self.forms[form].tensors.items()}

    def start(self, group: Group, slot: str) -> float:
        """The number that fills a state tensor before the first update."""
        return float(self.starts[slot](group)) if slot in self.starts else 0.0

    @property
    def updates(self) -> list[Op]:
        """The update ops of all forms of state."""
        return [self.update, *(form.update for form in self.forms.values())]

    def values(self, group: Group) -> dict[str, float]:
        """The hyperparameters of a group. Raises KeyError, TypeError or ValueError where one is
        missing or is not a number."""
        return {name: float(read(group)) for name, read in self.hyperparameters.items()}


def beta(i: int) -> Callable[[Group], float]:
    """A function that reads a group's `betas[i]`."""
    return lambda group: group["betas"][i]


def decoupled(group: Group) -> dict[str, Any]:
    """`Optimizer.attributes` of torch's `decoupled_weight_decay`."""
    return {"decoupled": int(group["decoupled_weight_decay"])}


def setting(name: str) -> Callable[[Group], float]:
    """A function that reads the setting of this name from a group."""
    return lambda group: group[name]


def updated_types(slots: int) -> Callable[[Call], list[Type]]:
    """`Optimizer.update`'s `Op.infer`: the types of the parameter and of the slots that are
    present."""

    def infer(call: Call) -> list[Type]:
        return [call.type(0), *(call.type(2 + i) for i in range(slots) if call.present(2 + i))]

    return infer


__all__ = [
    "Group",
    "Groups",
    "Optimizer",
    "StateForm",
    "beta",
    "decoupled",
    "every_slot",
    "no_attributes",
    "setting",
    "updated_types",
]
