"""Batches that are split into parts, so that their step fits into memory.

The parts are micro-batches of one window: the loss and the gradients are the means over the labels
of all, and samples are numbered across them, which dropout masks follow. So the step is that of the
whole batch, but for the order of sums.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.capture import CapturedModule
from onward.errors import OnwardError
from onward.execute import Executable
from onward.graph.graph import type_of
from onward.graph.signature import WINDOW
from onward.graph.types import LOW
from onward.prepare.batch import Batch, batch_of
from onward.prepare.graphs import Graphs
from onward.prepare.prepared_batch import OutputRequest, scalars
from onward.prepare.prepared_step import PreparedStep
from onward.train.result import StepResult

log = logging.getLogger("onward")

Step = PreparedStep[Executable]

# how close two sums of the losses of a few samples are, relative to the loss
_CLOSE, _CLOSE_IN_LOW = 1e-3, 3e-2
_TRIED = 4  # samples


class MicroBatches:
    """The number of parts of batches, by their shapes; 1 for those that fit."""

    def __init__(self) -> None:
        self._counts: dict[Any, int] = {}
        self._independent: weakref.WeakSet[Graphs] = weakref.WeakSet()  # those that were looked at

    def count(self, batch: Batch) -> int:
        """The number of parts that a batch is split into."""
        return self._counts.get(batch.signature, 1)

    def add(self, batch: Batch) -> bool:
        """Doubles the parts of batches of this shape. Returns whether there are samples for it."""
        count = min(2 * self.count(batch), batch.batch_size)
        if count == self.count(batch):
            return False
        self._counts[batch.signature] = count
        log.info("a batch of %d samples is split into %d parts", batch.batch_size, count)
        return True

    def parts(self, batch: Batch, step: Step) -> list[Batch]:
        """The parts of a batch, in the order of its samples. step: of the whole batch. Raises
        OnwardError for a batch that cannot be split."""
        count = self.count(batch)
        if count == 1:
            return [batch]
        return split(batch, _rows(batch, step), count)

    def check(self, step: Step, batch: Batch, adding: Callable[[Batch], Step]) -> None:
        """Raises OnwardError where a part's loss would not be its share of the whole batch's: the
        loss is no mean over labels, buffers move, or samples depend on each other.

        step: of the whole batch. adding: finds the step that adds up the gradients of a part.
        """
        if step.graphs in self._independent:
            return
        rows = _rows(batch, step)
        few = split(batch, rows, 1, _TRIED)[0]
        signature = adding(few).graphs.step.signature
        if not signature.windowed:
            raise refused("its loss is not a mean over labels or elements")
        if signature.written:
            raise refused(f"the forward writes the buffer {next(iter(signature.written))}")
        _check_independent(few, rows, adding)
        self._independent.add(step.graphs)


def split(
    batch: Batch, leaves: Sequence[int], count: int, samples: int | None = None
) -> list[Batch]:
    """Splits a batch into so many parts, the larger ones first. leaves: those that have a row for
    each sample; all others go with every part. samples: how many are taken; None: all."""
    total = batch.batch_size if samples is None else min(samples, batch.batch_size)
    count = min(count, total)
    sizes = [total // count + (i < total % count) for i in range(count)]
    found: list[Batch] = []
    start = 0
    for size in sizes:
        found.append(_part(batch, set(leaves), start, size))
        start += size
    return found


def _part(batch: Batch, leaves: set[int], start: int, size: int) -> Batch:
    flat, spec = pytree.tree_flatten(batch.given)
    number = -1
    for i, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor):
            number += 1
            if number in leaves:
                flat[i] = leaf.narrow(0, start, size)
    return batch_of(*pytree.tree_unflatten(flat, spec))


def _rows(batch: Batch, step: Step) -> list[int]:
    """The leaves with a row for each sample. Raises OnwardError where the graph does not say."""
    captured = step.captured
    found = captured.sample_leaves(batch.tensors) if isinstance(captured, CapturedModule) else []
    if not found:
        raise refused("the graph does not say which inputs have a row for each sample")
    return found


def _check_independent(few: Batch, rows: Sequence[int], adding: Callable[[Batch], Step]) -> None:
    """Raises OnwardError where the losses of two halves of a few samples are not those of all."""
    step, halves = adding(few), split(few, rows, 2)
    whole, close = _sums(step, few, 0)["loss"], _CLOSE
    offset, total = 0, 0.0
    for half in halves:
        total += _sums(adding(half), half, offset)["loss"]
        offset += half.batch_size
    graph = step.graphs.step
    if any(type_of(y).dtype in LOW for node in graph for y in node.outputs):
        close = _CLOSE_IN_LOW
    if not abs(whole - total) <= close * max(abs(whole), abs(total), 1e-6):
        raise refused(
            f"its samples depend on each other: the losses of {few.batch_size} samples add up to "
            f"{whole:.6g} together and to {total:.6g} in two halves"
        )


def _sums(step: Step, batch: Batch, offset: int) -> dict[str, float]:
    """What a window would have added up after this micro-batch alone."""
    prepared = step.prepare(batch, OutputRequest(()))
    signature = prepared.signature
    zero = torch.zeros((), dtype=torch.float64)
    inputs = {
        **prepared.inputs,
        **scalars(signature, torch.zeros(2, dtype=torch.int64), offset, weight=1.0),
        **dict.fromkeys(signature.window.values(), zero),
    }
    prepared.executable.run(inputs, prepared.dims)
    return {key: float(prepared.executable.output(signature.windowed[key])) for key in WINDOW}


def refused(why: str) -> OnwardError:
    """The error for a batch that does not fit into memory and cannot be split."""
    return OnwardError(
        f"the batch does not fit into memory, and auto_micro_batch cannot split it: {why}; fix: a "
        "smaller batch, memory_budget, or gradient_accumulation_steps"
    )


class PartResults:
    """The results of the parts of a batch, which become one."""

    def __init__(self) -> None:
        self._results: list[StepResult] = []
        self._labels: list[torch.Tensor] = []
        self._sizes: list[int] = []

    def add(self, result: StepResult, labels: torch.Tensor, samples: int) -> None:
        """Adds a part with so many labels f64[] and samples. Raises OnwardError for an output
        without a row for each sample, of which the whole batch's could not be made."""
        for name, output in result.outputs.items():
            if not output.dim() or len(output) != samples:
                raise refused(f"the output {name} has no row for each sample")
        self._results.append(result)
        self._labels.append(labels)
        self._sizes.append(samples)

    def joined(self) -> StepResult:
        """The result of the whole batch: that of its last part, but for the loss and the
        outputs."""
        last = self._results[-1]
        losses = {name: self._mean([r.losses[name] for r in self._results]) for name in last.losses}
        return replace(
            last,
            loss=self._mean([r.loss for r in self._results]),
            losses=losses,
            outputs={
                name: torch.cat([r.outputs[name] for r in self._results]) for name in last.outputs
            },
        )

    def _mean(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean f[] of the parts' losses over the labels of all; a part without labels does not
        count, even where its loss is NaN."""
        labels = torch.stack(self._labels)
        if not bool(labels.sum() > 0):
            return losses[0]
        counted = torch.stack(list(losses)).double()[labels > 0]
        kept = labels[labels > 0]
        return ((counted * kept).sum() / kept.sum()).to(losses[0].dtype)


__all__ = ["MicroBatches", "PartResults", "refused", "split"]
