"""The explanation of a training step: what was captured, what each pass did, which rows are kept,
where every byte is, and how large a batch fits. Facts apart from how they are shown."""

from onward.explanation.build import bytes_of, checked_sizes, explained, refused
from onward.explanation.facts import StepExplanation
from onward.explanation.of_trainer import explain_trainer
from onward.explanation.subject import Subject

__all__ = [
    "StepExplanation", "Subject", "bytes_of", "checked_sizes", "explain_trainer", "explained",
    "refused",
]  # fmt: skip
