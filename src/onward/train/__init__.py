"""Trainer: runs training steps as graphs, with optimizers, export and verification.

In: a model, an optimizer, options and batches. Out: updated weights, a StepResult for each batch.
Imports: prepare and explanation, and all that stands before them.
"""

from onward.train.result import StepResult
from onward.train.snapshot import TrainerSnapshot
from onward.train.trainer import Trainer

__all__ = ["StepResult", "Trainer", "TrainerSnapshot"]
