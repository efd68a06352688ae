"""Module: a wrapper around a model, for code that was written for one (ORTModule, DDP).

It is a face over `accelerate`: the model within is the user's own, parameters, buffers and
submodules have the names that they have there, and attributes are the model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from onward.explanation import StepExplanation
from onward.module.accelerate import accelerate, accelerated
from onward.train.report import Report

_OWN = frozenset({"module", "training"})


class Module(torch.nn.Module):
    """`onward.Module(model)` calls `model` as a graph; see `onward.accelerate` for the options.

    module: the model itself. Everything else that a caller reads or sets on the wrapper is the
    model's: parameters, methods, `config`, `state_dict` and its keys.
    """

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        accelerate(model, **options)  # before this one is a module: it raises for what is none
        super().__init__()
        self._modules["module"] = model
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._modules["module"](*args, **kwargs)  # type: ignore[misc]

    def report(self) -> Report:
        """Of the last call; see `Trainer.report`."""
        held = accelerated(self.module)
        assert held is not None, "what __init__ has accelerated"
        return held.report()

    def explain(
        self, batch: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> StepExplanation:
        """A training step of the model, or the last call's; see `onward.explain`."""
        held = accelerated(self.module)
        assert held is not None, "what __init__ has accelerated"
        return held.explain(batch, kwargs, **options)

    # ---- the model's attributes

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__["_modules"]["module"]
        return module if name == "module" else getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__.get("_modules", {})
        if "module" not in held or name in vars(self) or name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(held["module"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._modules["module"], name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._modules["module"])})

    # ---- names without a prefix

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state, *args, **kwargs)

    # ---- copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = state.pop("_onward_options", None)
        super().__setstate__(state)
        accelerate(self._modules["module"], **(options or {}))  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        held = accelerated(self.module)
        state = dict(self.__dict__)
        state.pop("_compiled_call_impl", None)
        return {**state, "_onward_options": vars(held.options) if held is not None else {}}


__all__ = ["Module"]
