"""A workload: a model and its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from suite.batches import Batch
from suite.cases import Case


@dataclass(frozen=True)
class Workload:
    """How to build a model for a case, and how to turn a stream of token ids into a batch."""

    build: Callable[[Case], nn.Module]
    vocabulary: Callable[[Case], int]
    batch: Callable[[Case, Tensor, torch.Generator], Batch]
    about: str  # one line for the table
