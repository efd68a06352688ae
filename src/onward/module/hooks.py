"""Hooks on an accelerated module itself, which run around its graph as around its forward.

Hooks on submodules are refused (model_state/refusals.py), since a graph cannot call them. Hooks
that only compute inputs of a forward (those of torch.nn, Transformers, peft) are traced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from onward.capture import is_traced

_OWN = ("_forward_pre_hooks", "_forward_hooks")


def run_around(model: torch.nn.Module) -> bool:
    """Whether the module has forward hooks to run around its graph. If any of its hooks is traced,
    all are, since hooks have to run in order."""
    held = vars(model)
    hooks = [hook for name in _OWN for hook in held[name].values()]
    return bool(hooks) and not any(map(is_traced, hooks))


@contextmanager
def aside(model: torch.nn.Module) -> Generator[None]:
    """A context in which the module lacks the hooks that run around its graph."""
    if not run_around(model):
        yield
        return
    held = vars(model)
    before = {name: held[name] for name in _OWN}
    try:
        held.update({name: OrderedDict() for name in _OWN})
        yield
    finally:
        held.update(before)


def call_with_hooks(
    model: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls `call(*args, **kwargs)` with the module's forward hooks around it, as nn.Module
    does."""
    for key, hook in list(model._forward_pre_hooks.items()):
        if key in model._forward_pre_hooks_with_kwargs:
            found = hook(model, args, kwargs)
            if found is not None:
                args, kwargs = found
        elif (found := hook(model, args)) is not None:
            args = found if isinstance(found, tuple) else (found,)
    called: set[int] = set()
    try:
        result = call(*args, **kwargs)
        for key, hook in list(model._forward_hooks.items()):
            called.add(key)
            result = _after(model, key, hook, args, kwargs, result)
        return result
    except Exception:
        for key, hook in list(model._forward_hooks.items()):
            if key in model._forward_hooks_always_called and key not in called:
                _after(model, key, hook, args, kwargs, None)
        raise


def _after(
    model: Any, key: int, hook: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Any:
    given = (args, kwargs) if key in model._forward_hooks_with_kwargs else (args,)
    found = hook(model, *given, result)
    return result if found is None else found


__all__ = ["aside", "call_with_hooks", "run_around"]
