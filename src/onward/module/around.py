"""Calls that bypass the graph and run the module's own forward in eager PyTorch.

Some bypass it silently: within a trace, a functorch transform, or a mode that observes operators.
Others run in eager because no graph can be made for them yet, and the caller is told why.
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
from onward.model_state.device import device_of

_CORE: Any = torch._C  # pyright: ignore[reportPrivateUsage]
CACHES = ("past_key_values", "past_key_value", "cache_params", "use_cache")


def goes_around() -> bool:
    """Whether the caller has to see the operators themselves, so that the call bypasses the
    graph."""
    return (
        # asked for by the user, or within a capture, a check of side effects or a verification
        is_eager()
        or running()  # within a region of an outer graph
        or _CORE._get_tracing_state() is not None
        or (
            (torch.compiler.is_compiling() or torch.compiler.is_exporting())
            and not traced_elsewhere()
        )
        or _CORE._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or any(_watching())
        # within a CUDA graph of the user's, where nothing may wait for the device
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def _watching() -> Iterator[bool]:
    """For each active torch function or dispatch mode, whether it observes operators."""
    if not (_CORE._len_torch_function_stack() or _CORE._len_torch_dispatch_stack()):
        return
    stacks: Any = (
        torch.overrides._get_current_function_mode_stack(),  # pyright: ignore[reportPrivateUsage]
        _python_dispatch._get_current_dispatch_mode_stack(),  # pyright: ignore[reportPrivateUsage]
    )
    for mode in itertools.chain.from_iterable(stacks):
        yield type(mode) is not _device.DeviceContext


def surroundings() -> str | None:
    """The reason why no graph can run at this point of the program; None where one can."""
    try:
        refuse_surroundings(autocast=False)
    except CaptureError as error:
        return str(error)
    return None


class Mode(NamedTuple):
    """The settings, besides module and arguments, that a graph depends on. grad: gradients are on.
    autocast: the dtype of `torch.autocast`, None where it is off. inference: inference mode is on,
    which a forward may ask."""

    grad: bool
    autocast: torch.dtype | None
    inference: bool = False


def mode_here(model: torch.nn.Module) -> Mode:
    """The mode in which the model is being called."""
    autocast = None
    if any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES)):
        device = device_of(model).type
        if torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
    return Mode(torch.is_grad_enabled(), autocast, torch.is_inference_mode_enabled())


def autocast_off() -> AbstractContextManager[Any]:
    """A context without autocast: the graph's kernels already have the dtypes that they compute
    in."""
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
    """Whether the call fills or reads a key/value cache, as generation does. takes: whether the
    forward has a parameter `use_cache`. setting: the model's."""
    if any(kwargs.get(name) not in (None, False) for name in CACHES):
        return True
    if not takes or "use_cache" in kwargs or torch.is_grad_enabled():
        return False
    return kwargs.get("labels") is None and setting.is_on(model)


__all__ = [
    "Mode",
    "autocast_off",
    "goes_around",
    "mode_here",
    "surroundings",
    "uses_cache",
]
