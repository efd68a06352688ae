"""The explanation of a training step: what was captured, what each pass did, which rows are kept,
where every byte is, and how large a batch fits. Facts apart from how they are shown. A loop
describes its step as a `Subject`; `explained` makes the explanation of it."""

from onward.explanation.build import bytes_of, checked_sizes, explained, refused
from onward.explanation.row_report import RowReport
from onward.explanation.step_explanation import StepExplanation
from onward.explanation.subject import Subject

__all__ = [
    "RowReport", "StepExplanation", "Subject", "bytes_of", "checked_sizes", "explained", "refused",
]  # fmt: skip
