"""Onward: the whole training step of a transformer as one optimised ONNX graph."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onward.config import CaptureError, OnwardError, TrainerOptions

if TYPE_CHECKING:
    from onward.train import StepResult, Trainer, optim

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "OnwardError",
    "StepResult",
    "Trainer",
    "TrainerOptions",
    "__version__",
    "optim",
]

_LATER = {"StepResult": "onward.train", "Trainer": "onward.train", "optim": "onward.train.optim"}


def __getattr__(name: str) -> Any:
    """Names that need torch are imported at first use, so that `import onward` stays quick."""
    if name not in _LATER:
        raise AttributeError(f"module 'onward' has no attribute '{name}'")
    module = importlib.import_module(_LATER[name])
    return module if name == "optim" else getattr(module, name)
