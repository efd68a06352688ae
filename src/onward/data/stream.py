"""Streams: iterable datasets whose batches are the same in every process, and from any place on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

from onward.data.order import generators_kept, seed_all


class StreamBatch(NamedTuple):
    """A batch of a stream. samples: their number. is_last: whether the epoch ends with it."""

    batch: Any
    samples: int
    is_last: bool


class SeededStream(IterableDataset[StreamBatch]):
    """An iterable dataset whose samples and batches draw the same random numbers in whatever
    process they are made: by (seed, epoch, number in the epoch), as those of `SeededDataset`.

    dataset: is iterated anew for each epoch, after its `set_epoch(epoch)` if it has one. place: the
    epoch and the sample to begin with, i64[2] in memory that workers share, since persistent ones
    keep their copy of everything else.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self.dataset, self.collate = dataset, collate
        self._size, self._seed, self._drop_last = batch_size, seed, drop_last
        self.place = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[StreamBatch]:
        """The batches from the place on."""
        epoch, first = self.place.tolist()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        samples = self._samples(epoch)
        for _ in islice(samples, first):  # what was seen
            pass
        taken = list(islice(samples, self._size))
        while taken:
            following = list(islice(samples, self._size))  # tells whether the epoch goes on
            short = len(following) < self._size
            if self._drop_last and len(taken) < self._size:
                return
            with generators_kept():
                seed_all(self._seed, epoch, first, len(taken))
                batch = self.collate(taken)
            is_last = not following or (self._drop_last and short)
            yield StreamBatch(batch, len(taken), is_last)
            first, taken = first + len(taken), following

    def _samples(self, epoch: int) -> Iterator[Any]:
        """The samples of an epoch; each is made with the generators seeded by its number."""
        number = 0
        with generators_kept(), _no_worker():
            seed_all(self._seed, epoch)
            samples = iter(self.dataset)
        while True:
            with generators_kept(), _no_worker():
                seed_all(self._seed, epoch, number)
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            number += 1
            yield sample


@contextmanager
def _no_worker() -> Generator[None]:
    """A context in which a dataset does not see that a worker reads it, the only one there is:
    `datasets` shuffles in another order there."""
    before = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = before


__all__ = ["SeededStream", "StreamBatch"]
