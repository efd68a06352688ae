"""Explains a training step: what was captured, what each pass did, which rows are kept, where every
byte is, and how large a batch fits.

In: a `Subject`, by which a loop describes its step. Out: from `explained` a `StepExplanation`:
facts, separate from how they are shown.
Imports: prepare and all that stands before it, nothing of train or module.
"""

from onward.explanation.build import NOTHING_MORE, ExplanationRequest, asked_for, explained, refused
from onward.explanation.row_report import RowReport
from onward.explanation.step_explanation import StepExplanation
from onward.explanation.subject import Subject

__all__ = [
    "NOTHING_MORE", "ExplanationRequest", "RowReport", "StepExplanation", "Subject", "asked_for",
    "explained", "refused",
]  # fmt: skip
