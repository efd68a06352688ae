"""Module: a wrapper around an accelerated model, for code that expects one (ORTModule, DDP).

The wrapper has no state: its `__dict__` is the model's, and it forwards attribute access to the
model. So code that walks through a model that contains a wrapper (`named_parameters`, `state_dict`,
DDP, FSDP, peft) finds each tensor under the name that it has without the wrapper.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, MutableMapping
from typing import Any

import torch

from onward.capture import SLOT, unwrapped
from onward.errors import OnwardError
from onward.explanation import StepExplanation
from onward.module.accelerate import Accelerated, accelerate, accelerated
from onward.module.explain import explain
from onward.prepare.report import Report

# prefix of names in checkpoints of an older wrapper, which held its model as a submodule
_OLD = "module."
_KEPT = {  # names of nn.Module that the wrapper does not take from the model
    "__delattr__", "__dir__", "__getattr__", "__init__", "__repr__", "__setattr__", "__setstate__",
    "_load_from_state_dict", "forward", "load_state_dict", "modules", "named_modules",
}  # fmt: skip


class Module(torch.nn.Module):
    """Calls of `onward.Module(model)` run `model` as a graph; see `onward.accelerate` for the
    options.

    module: the model itself. All else that a caller reads or sets on the wrapper is the model's:
    parameters, methods, hooks, `config`, `state_dict` and its keys, `__class__`.
    """

    __slots__ = (SLOT,)
    _onward_model: torch.nn.Module

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        # before `super().__init__`, since it raises for anything but a module
        accelerate(model, **options)
        self._take(model)

    def _take(self, model: torch.nn.Module) -> None:
        object.__setattr__(self, SLOT, model)
        object.__setattr__(self, "__dict__", vars(model))

    @property
    def module(self) -> torch.nn.Module:
        return self._onward_model

    @module.setter
    def module(self, model: torch.nn.Module) -> None:
        accelerate(model, **vars(self._accelerated().options))
        self._take(model)

    @property
    def forward(self) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The model's own forward. Only a call of the wrapper itself runs as a graph."""
        return self.module.forward

    def report(self) -> Report:
        """Reports the last call; see `Trainer.report`."""
        return self._accelerated().report()

    def explain(
        self, batch: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> StepExplanation:
        """Explains a training step of the model, or the last call; see `onward.explain`."""
        return explain(self._accelerated().model, batch, kwargs, **options)

    def _accelerated(self) -> Accelerated:
        held = accelerated(self.module)
        if held is None:  # `Module.compile` was called since
            raise OnwardError(
                "the wrapped model is no longer accelerated (model.compile() was called "
                "since); fix: onward.accelerate(model)"
            )
        return held

    # ---- the model's attributes

    @property
    def __class__(self) -> type[torch.nn.Module]:  # type: ignore[override]
        """The model's class, for `isinstance` and for code that assigns a subclass
        (parametrizations, FSDP). `type(wrapper)` is `onward.Module`."""
        return self.module.__class__

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self.module._version

    def __getattr__(self, name: str) -> Any:
        if name == SLOT:  # the wrapper is still being made
            raise AttributeError(name)
        return getattr(self._onward_model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.module)})

    def __repr__(self) -> str:
        return f"onward.Module({self.module!r})"

    # ---- identity: the wrapper counts as the model in sets and dicts of modules

    def __eq__(self, other: object) -> bool:
        return bool(self.module == unwrapped(other))

    def __hash__(self) -> int:
        return hash(self.module)

    def named_modules(self, memo: Any = None, *args: Any, **kwargs: Any) -> Generator[Any]:
        """The model's modules. Asked on the wrapper itself, it lists the wrapper first; a module
        that contains the wrapper lists the model in its place."""
        for name, found in self.module.named_modules(memo, *args, **kwargs):
            yield name, self if memo is None and found is self.module else found

    def modules(self, *args: Any, **kwargs: Any) -> Generator[torch.nn.Module]:
        for found in self.module.modules(*args, **kwargs):
            yield self if found is self.module else found

    # ---- checkpoints with the names that parameters had when the model was a submodule

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        given = state_dict
        if isinstance(state_dict, Mapping) and any(k.startswith(_OLD) for k in state_dict):
            given = OrderedDict(state_dict)
            if hasattr(state_dict, "_metadata"):
                given._metadata = state_dict._metadata  # type: ignore[attr-defined]
            self._rename(given, "")
        return self.module.load_state_dict(given, *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self._rename(state_dict, prefix)
        self.module._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _rename(self, state: MutableMapping[str, Any], prefix: str) -> None:
        """Renames keys of older checkpoints, unless the model has a submodule called `module`."""
        if "module" in self._modules:
            return
        old = prefix + _OLD
        for key in [key for key in state if key.startswith(old)]:
            now = key.removeprefix(prefix)
            while now.startswith(_OLD):
                now = now.removeprefix(_OLD)
            if prefix + now not in state:
                state[prefix + now] = state.pop(key)

    # ---- copies

    def __reduce_ex__(self, protocol: Any) -> Any:
        held = accelerated(self.module)
        options = vars(held.options) if held is not None else {}
        return _made, (type(self),), {"model": self.module, "options": options}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the wrapper, not with the model's own `__deepcopy__`."""
        make, args, state = self.__reduce_ex__(4)
        memo[id(self)] = twin = make(*args)
        twin.__setstate__(copy.deepcopy(state, memo))
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_modules" in state:  # pickled by an older version, which held its model as a submodule
            model, options = state["_modules"]["module"], state.get("_onward_options")
        else:
            model, options = state["model"], state["options"]
        accelerate(model, **(options or {}))
        self._take(model)


def _made(kind: type[Module]) -> Module:
    return kind.__new__(kind)


def _asks_the_model(name: str) -> Callable[..., Any]:
    def method(self: Module, *args: Any, **kwargs: Any) -> Any:
        model = self.module
        found = getattr(model, name)(*args, **kwargs)
        return self if found is model else found

    return functools.wraps(getattr(torch.nn.Module, name))(method)


for _name, _value in vars(torch.nn.Module).items():
    if callable(_value) and _name not in _KEPT and not isinstance(_value, type):
        setattr(Module, _name, _asks_the_model(_name))


__all__ = ["Module"]
