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


def stand_in(batch: Batch, micro_batches: int = 1, example: Batch | None = None) -> Batch:
    """A batch in the place of one without rows. It has two rows, or one for each of the
    micro-batches that ranks along `pp` make of it.

    example: a batch that this rank has had, whose rows it takes, since a model may divide by what
    they hold, such as lengths. Without one of the same structure rows are zeros, and masks hide
    nothing.
    """
    rows = max(ROWS, micro_batches)
    taken = None if example is None else _rows_of(batch, example, rows)
    if taken is not None:
        return taken

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


def _rows_of(batch: Batch, example: Batch, rows: int) -> Batch | None:
    """A batch whose tensors have so many rows of the example's, again and again where it has fewer;
    None for a batch of another structure."""
    leaves, spec = pytree.tree_flatten(batch.given)
    others, other_spec = pytree.tree_flatten(example.given)
    if spec != other_spec:
        return None
    for i, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0]:
            continue
        is_like = isinstance(other, torch.Tensor) and other.dtype == leaf.dtype
        if not is_like or other.dim() != leaf.dim() or not len(other):
            return None
        leaves[i] = other[torch.arange(rows, device=other.device) % len(other)]
    return batch_of(*pytree.tree_unflatten(leaves, spec))


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
