"""Loops over data: training with evaluation, checkpoints and callbacks, and evaluation alone.

In: a Trainer and batches. Out: the trained model, and metrics. Imports: train and what lies below
it; transformers for its callbacks.
"""

from onward.fitting.evaluation import Evaluation, Metric, Predictions, evaluate
from onward.fitting.fit_options import FitOptions
from onward.fitting.loop import FitResult, fit

__all__ = [
    "Evaluation",
    "FitOptions",
    "FitResult",
    "Metric",
    "Predictions",
    "evaluate",
    "fit",
]
