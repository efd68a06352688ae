"""Calls that go around the graph, to the module's own forward in eager PyTorch.

Some have to, and nobody is told: a trace, a transform of functorch's, a mode that is to see every
operator. Others run in eager because a graph has no form for them yet, and the caller is told why.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils import _device, _python_dispatch

from onward.capture import (
    AUTOCAST_DEVICES,
    CacheSetting,
    is_eager,
    refuse_surroundings,
    traced_elsewhere,
)
from onward.errors import CaptureError
from onward.kernels import running

_CORE: Any = torch._C  # pyright: ignore[reportPrivateUsage]
CACHES = ("past_key_values", "past_key_value", "cache_params", "use_cache")


def goes_around() -> bool:
    """Whether whoever calls is to see the operators themselves."""
    return (
        is_eager()  # as the user asks; within a capture, a rehearsal or a verification
        or running()  # within a region of an outer graph
        or _CORE._get_tracing_state() is not None
        or (
            (torch.compiler.is_compiling() or torch.compiler.is_exporting())
            and not traced_elsewhere()
        )
        or _CORE._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or any(_watching())
    )


def _watching() -> Iterator[bool]:
    """Modes that are told of each operator."""
    if not (_CORE._len_torch_function_stack() or _CORE._len_torch_dispatch_stack()):
        return
    stacks: Any = (
        torch.overrides._get_current_function_mode_stack(),  # pyright: ignore[reportPrivateUsage]
        _python_dispatch._get_current_dispatch_mode_stack(),  # pyright: ignore[reportPrivateUsage]
    )
    for mode in itertools.chain.from_iterable(stacks):
        yield type(mode) is not _device.DeviceContext


def surroundings() -> str | None:
    """Why no graph runs here, where none does."""
    try:
        refuse_surroundings(autocast=False)
    except CaptureError as error:
        return str(error)
    return None


class Mode(NamedTuple):
    """What decides of a graph besides the module and the arguments. grad: whether gradients are on.
    autocast: what `torch.autocast` casts to, None where it is off. inference: whether the call is
    made in inference mode, for which a forward may ask."""

    grad: bool
    autocast: torch.dtype | None
    inference: bool = False


def device_of(model: torch.nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def mode_here(model: torch.nn.Module) -> Mode:
    """The mode that a call of the model is made in."""
    autocast = None
    if any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES)):
        device = device_of(model).type
        if torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
    return Mode(torch.is_grad_enabled(), autocast, torch.is_inference_mode_enabled())


def autocast_off() -> AbstractContextManager[Any]:
    """Within it no operator is cast: those that a graph's kernels call say themselves in what type
    they compute."""
    on = [device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
    if not on:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for device in on:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def uses_cache(
    model: torch.nn.Module, kwargs: Mapping[str, Any], takes: bool, setting: CacheSetting
) -> bool:
    """Whether the call is to fill or read a cache of keys and values, as generation does. takes:
    whether the forward has a parameter `use_cache`. setting: the model's."""
    if any(kwargs.get(name) not in (None, False) for name in CACHES):
        return True
    if not takes or "use_cache" in kwargs or torch.is_grad_enabled():
        return False
    return kwargs.get("labels") is None and setting.is_on(model)


__all__ = [
    "Mode",
    "autocast_off",
    "device_of",
    "goes_around",
    "mode_here",
    "surroundings",
    "uses_cache",
]
