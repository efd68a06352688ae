"""Ensures that a function of torch that the user has wrapped runs only once per call in a trace.

`F.layer_norm`, written in Python, dispatches to a trace's function modes by passing itself, looked
up by name. If a wrapper stands under that name, each mode would run the wrapper, with its side
effects, once more.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from onward.model_state.patches import Patch

_TORCH = str(Path(torch.__file__).parent)
_ONWARD = str(Path(__file__).parents[2])
_FUNCTIONAL: Any = torch.nn.functional
# owners of functions, with the files that define the functions
_OWNERS: tuple[tuple[Any, str], ...] = (
    (_FUNCTIONAL, f"{_TORCH}/nn/functional.py"),
    (torch.functional, f"{_TORCH}/functional.py"),
    (torch.Tensor, f"{_TORCH}/_tensor.py"),
)


def run_once() -> Iterator[Patch]:
    """Yields a patch for each function of torch, written in Python, that has been replaced."""
    for owner, file in _OWNERS:
        for name, found in list(vars(owner).items()):
            if isinstance(found, types.FunctionType) and not _is_torchs(found.__code__):
                yield owner, name, _once(name, file, found)


def _is_torchs(code: types.CodeType) -> bool:
    return code.co_filename.startswith((_TORCH, _ONWARD))


def _once(name: str, file: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        return (_handing_on(name, file) or replacement)(*args, **kwargs)

    return called


def _handing_on(name: str, file: str) -> Callable[..., Any] | None:
    """Returns the original, if it is what dispatches this call; None if the model calls."""
    frame = sys._getframe(2)
    while frame is not None and _is_torchs(frame.f_code):
        code = frame.f_code
        if code.co_name == name and code.co_filename == file:
            return types.FunctionType(code, frame.f_globals, name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


__all__ = ["run_once"]
