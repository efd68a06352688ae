"""The user's loop: Trainer, optimizers, verification."""

from onward.train.trainer import StepResult, Trainer

__all__ = ["StepResult", "Trainer"]
