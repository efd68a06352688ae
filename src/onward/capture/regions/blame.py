"""Finds the submodule that an error is about: the innermost one being called, or one it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from onward.errors import CaptureError

_CALLS = ("_call_impl", "_wrapped_call_impl")


def named_places(error: CaptureError, model: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """Returns, for each place that an error names, the module there and then those around it, from
    the inside out, without the model itself."""
    named: Mapping[str, torch.nn.Module] = dict(model.named_modules())
    return [[named[p] for p in _upwards(path) if p in named] for path in error.places]


def blamed(error: BaseException, model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the submodule that was being called and then those around it, from the inside out,
    without the model itself; empty where no submodule was being called."""
    own = {id(vars(m)): m for m in model.modules() if m is not model}
    for cause in causes(error):
        found = [m for m in _called(cause) if id(vars(m)) in own]
        if found:
            # in a trace modules are proxies with the `__dict__` of the real ones
            return list(dict.fromkeys(own[id(vars(m))] for m in reversed(found)))
    return []


def _upwards(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def causes(error: BaseException | None) -> list[BaseException]:
    """Returns an error and its chain of causes and contexts, the original error first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.insert(0, error)
        error = error.__cause__ or error.__context__
    return found


def _called(error: BaseException) -> Iterator[Any]:
    """Yields the modules in whose calls an error was raised, from the outside in."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name in _CALLS:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module):
                yield module
        trace = trace.tb_next


__all__ = ["blamed", "causes", "named_places"]
