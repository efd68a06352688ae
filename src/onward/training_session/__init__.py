"""Training of models that are ONNX files: arrays in and out, on the Trainer's engine.

In: an ONNX model, an optimizer, a loss. Out: a `TrainingSession`. Imports: the Trainer and what it
is made of; the command line and other packages' front ends stand on it.
"""

from onward.training_session.session import SessionResult, TrainingSession

__all__ = ["SessionResult", "TrainingSession"]
