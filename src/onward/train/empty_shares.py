"""A share without rows: a rank whose data have ended takes part in a step with rows whose labels do
not count, so that its gradients are zeros and the batch is that of the other ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.capture import Captured
from onward.differentiate import label_inputs
from onward.errors import OnwardError
from onward.options import TrainerOptions
from onward.prepare.batch import Batch, batch_of

ROWS = 2  # of the stand-in, at least: sizes of 1 have captures of their own


def stand_in(batch: Batch, micro_batches: int = 1) -> Batch:
    """A batch of rows of zeros, in the place of one without rows; masks of it hide nothing. It has
    two rows, or one for each of the micro-batches that ranks along `pp` make of it."""
    rows = max(ROWS, micro_batches)

    def filled(leaf: object, number: int = 0) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and not leaf.shape[0]:
            is_choice = leaf.dtype == torch.bool
            return leaf.new_full((rows, *leaf.shape[1:]), is_choice or number)
        return leaf

    args, kwargs, target = batch.given
    shown: dict[str, Any] = {}
    for name, value in kwargs.items():
        number = int("mask" in name and not _is_added(value))
        shown[name] = pytree.tree_map(partial(filled, number=number), value)
    return batch_of(pytree.tree_map(filled, args), shown, pytree.tree_map(filled, target))


def _is_added(value: Any) -> bool:
    """Whether a mask is added to scores, where 0 hides nothing."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2


def without_labels(batch: Batch, captured: Captured, options: TrainerOptions) -> Batch:
    """A stand-in whose labels do not count. captured: the call that it runs. Raises OnwardError for
    a loss that is not a mean over labels that can be left out."""
    found = label_inputs(captured.graph)
    if options.gradient_accumulation_average == "micro_batches":
        found = "each rank's mean counts alike"
    if isinstance(found, str):
        raise OnwardError(
            "a rank without rows takes part in a step by labels that its loss ignores, and here "
            f"{found}; fix: compute a cross entropy of the batch's labels, or give every rank one "
            "row at least (drop_last=True)"
        )
    numbers = {id(batch.tensors[i]): found.get(name) for i, name in captured.leaves.items()}

    def ignored(leaf: object) -> object:
        number = numbers.get(id(leaf))
        return torch.full_like(leaf, number) if number is not None else leaf  # type: ignore[arg-type]

    args, kwargs, target = pytree.tree_map(ignored, batch.given)
    return batch_of(args, kwargs, target)


__all__ = ["stand_in", "without_labels"]
