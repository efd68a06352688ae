"""Predicts memory at other batch sizes, and the largest batch that fits, from plans; nothing
runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

from onward.errors import OnwardError
from onward.explanation.facts import LargestBatch, SizedMemory
from onward.explanation.subject import Given, Remade, Subject

MOST = 1 << 24  # samples; larger batches are not tried


class Sizes:
    """Predictions for batches like a subject's. A batch size of 1 needs a capture of its own."""

    def __init__(self, remade: Remade) -> None:
        self._remade = remade
        self._others: dict[int, Remade] = {}  # by the size of the captured batch
        self._known: dict[int, int] = {}
        self.planned = 0

    def predict(self, batch_size: int) -> SizedMemory:
        """The predicted memory of a batch of so many samples, or the reason why there is none."""
        try:
            return SizedMemory(batch_size, self.nbytes(batch_size))
        except OnwardError as error:
            return SizedMemory(batch_size, None, _line(error))

    def nbytes(self, batch_size: int) -> int:
        """The predicted bytes of a batch of so many samples. Raises OnwardError where there cannot
        be one."""
        if batch_size not in self._known:
            self.planned += 1
            self._known[batch_size] = self._for(batch_size).memory_at(batch_size).total
        return self._known[batch_size]

    def largest(self, memory: int) -> LargestBatch:
        """Finds the most samples that fit into so many bytes."""
        try:
            many = self._for(max(2, self._remade.batch_size))
            if not many.is_sized:
                reason = f"the model's graph is fixed to the batch size {many.batch_size}"
                return LargestBatch(memory, 0, None, None, reason)
            unit = many.multiple
            found = largest(lambda n: self._fits_as(n * unit), memory, many.batch_size // unit)
        except OnwardError as error:
            return LargestBatch(memory, 0, None, None, _line(error), self.planned)
        size = found * unit
        nbytes, beyond = self._known.get(size), self._known.get(size + unit)
        reason = f"sizes above {size} were not tried" if found >= MOST else ""
        return LargestBatch(memory, size, nbytes, beyond, reason, self.planned)

    def _fits_as(self, batch_size: int) -> int | None:
        try:
            return self.nbytes(batch_size)
        except OnwardError:
            if self._remade.subject.memory_budget is None:
                raise
            return None  # its memory budget is too small

    def _for(self, batch_size: int) -> Remade:
        """The step whose graph serves so many samples."""
        remade = self._remade
        if batch_size == remade.batch_size or (batch_size > 1 and remade.is_sized):
            return remade
        captured = batch_size if batch_size == 1 or remade.batch_size > 1 else 2
        if captured not in self._others:
            subject = remade.subject
            again = subject.again(*resized(subject, captured))
            self._others[captured] = Remade(again, remade.target)
        return self._others[captured]


def largest(nbytes: Callable[[int], int | None], memory: int, start: int) -> int:
    """The largest n, up to MOST, with nbytes(n) <= memory; 0 if 1 is too many. `nbytes` must grow
    with n; it is nearly linear, so that a few calls suffice. None counts as too many."""
    fits, beyond = 0, MOST + 1
    known: list[tuple[int, int]] = []
    n = max(1, start)
    for asked in range(200):
        found = nbytes(n)
        if found is not None and found <= memory:
            fits = n
        else:
            beyond = n
        if found is not None:
            known = [*known, (n, found)][-2:]
        if beyond - fits <= 1:
            break
        n = _guess(known, memory)
        if asked % 4 == 3 or n is None:  # bisect sometimes, in case it is not linear
            n = fits * 2 if beyond > MOST else (fits + beyond) // 2
        n = min(max(n, fits + 1), beyond - 1, max(16 * fits, 2 * start))
    return fits


def _guess(known: list[tuple[int, int]], memory: int) -> int | None:
    """The batch size at which the line through the last two predictions reaches the memory."""
    if len(known) < 2:
        return None
    (a, low), (b, high) = sorted(known)
    slope = (high - low) / (b - a) if b > a else 0.0
    return a + int((memory - low) / slope) if slope > 0 else None


def resized(subject: Subject, batch_size: int) -> Given:
    """The arguments of a batch of so many samples: the example's samples, repeated in order."""
    batch = subject.batch
    leading = {id(batch.tensors[i]) for i in subject.captured.leading_leaves(batch.tensors)}
    rows = torch.arange(batch_size) % batch.batch_size

    def cut(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and id(leaf) in leading:
            return leaf.detach()[rows.to(leaf.device)].requires_grad_(leaf.requires_grad)
        return leaf

    return pytree.tree_map(cut, batch.given)


def _line(error: OnwardError) -> str:
    return " ".join(str(error).split())
