"""The user's loop: Trainer, optimizers, verification."""

from onward.train.result import StepResult
from onward.train.snapshot import TrainerSnapshot
from onward.train.trainer import Trainer

__all__ = ["StepResult", "Trainer", "TrainerSnapshot"]
