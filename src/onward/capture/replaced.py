"""Functions of torch's that a user has replaced by one around the original: run once in a trace.

`F.layer_norm`, written in Python, hands itself to the modes of a trace by its name, under which the
replacement stands: each mode would run the replacement, and what it does, once more.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from onward.capture.patches import Patch

_TORCH = str(Path(torch.__file__).parent)
_ONWARD = str(Path(__file__).parents[1])
_FUNCTIONAL: Any = torch.nn.functional
# with the files that the functions are written in
_OWNERS: tuple[tuple[Any, str], ...] = (
    (_FUNCTIONAL, f"{_TORCH}/nn/functional.py"),
    (torch.functional, f"{_TORCH}/functional.py"),
    (torch.Tensor, f"{_TORCH}/_tensor.py"),
)


def run_once() -> Iterator[Patch]:
    """What stands, while a trace runs, for each replacement of a function written in Python."""
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
    """The original, where it is what has handed a call on by its name; None where a model calls."""
    frame = sys._getframe(2)
    while frame is not None and _is_torchs(frame.f_code):
        code = frame.f_code
        if code.co_name == name and code.co_filename == file:
            return types.FunctionType(code, frame.f_globals, name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


__all__ = ["run_once"]
