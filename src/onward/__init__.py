"""Onward: the whole training step of a transformer as one optimised ONNX graph."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from onward.errors import (
    CaptureError,
    CheckpointError,
    EagerWarning,
    LossSpikeError,
    NonfiniteError,
    OnwardError,
    OutOfMemoryError,
)
from onward.options import LossScale, ModuleOptions, TrainerOptions

if TYPE_CHECKING:
    from onward import data, loss
    from onward.capture import WeightedLosses
    from onward.fitting import FitOptions, evaluate, fit
    from onward.module import Module, accelerate, eager, explain
    from onward.reporting import Reporter
    from onward.train import StepResult, Trainer, optim
    from onward.training_session import TrainingSession

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CheckpointError",
    "EagerWarning",
    "FitOptions",
    "LossScale",
    "LossSpikeError",
    "Module",
    "ModuleOptions",
    "NonfiniteError",
    "OnwardError",
    "OutOfMemoryError",
    "Reporter",
    "StepResult",
    "Trainer",
    "TrainerOptions",
    "TrainingSession",
    "WeightedLosses",
    "__version__",
    "accelerate",
    "data",
    "eager",
    "evaluate",
    "explain",
    "fit",
    "loss",
    "optim",
]

_LATER = {
    "FitOptions": "onward.fitting",
    "Module": "onward.module",
    "Reporter": "onward.reporting",
    "StepResult": "onward.train",
    "Trainer": "onward.train",
    "TrainingSession": "onward.training_session",
    "WeightedLosses": "onward.capture",
    "accelerate": "onward.module",
    "data": "onward.data",
    "eager": "onward.module",
    "evaluate": "onward.fitting",
    "explain": "onward.module",
    "fit": "onward.fitting",
    "loss": "onward.loss",
    "optim": "onward.train.optim",
}


def __getattr__(name: str) -> Any:
    """Imports names that need torch at first use, so that `import onward` stays fast."""
    if name not in _LATER:
        raise AttributeError(f"module 'onward' has no attribute '{name}'")
    module = importlib.import_module(_LATER[name])
    return module if name in ("data", "loss", "optim") else getattr(module, name)
