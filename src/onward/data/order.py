"""The order of the samples of each epoch, and what each sample draws at random.

Both are functions of a seed, the epoch and the place in it, so that a run that resumes needs no
state of a worker, and goes to any place at once.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info


class Place(NamedTuple):
    """A sample's place: its epoch, its number in the epoch, its index in the dataset."""

    epoch: int
    number: int
    index: int


@dataclass(frozen=True)
class Order:
    """The order of a dataset's samples in an epoch: `Generator(PCG64((seed, epoch))).permutation`.

    size: of the dataset. shuffle: otherwise samples come as they lie.
    """

    size: int
    seed: int
    shuffle: bool

    def indices(self, epoch: int) -> np.ndarray:
        """The indices `i64[size]` of an epoch's samples, in their order."""
        if not self.shuffle:
            return np.arange(self.size)
        return np.random.Generator(np.random.PCG64((self.seed, epoch))).permutation(self.size)

    def sha256(self, epoch: int) -> str:
        """The digest of an epoch's order, by which a resumed run sees that it has the same one."""
        return _digest(self, epoch)


@functools.lru_cache(maxsize=4)
def _digest(order: Order, epoch: int) -> str:
    return hashlib.sha256(order.indices(epoch).astype("<i8").tobytes()).hexdigest()


class SeededDataset(Dataset[Any]):
    """A dataset whose batches draw the same random numbers in whatever process they are made.

    Python's, NumPy's and PyTorch's generators are seeded before each sample by (seed, epoch, number
    in the epoch), and before samples are collated; the main process has its own back behind it.
    """

    def __init__(self, dataset: Any, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate

    def __getitems__(self, places: Sequence[Place]) -> Any:
        """The batch of the samples at these places; what a DataLoader asks for."""
        found: list[Any] = []
        with generators_kept():
            for place in places:
                seed_all(self.seed, place.epoch, place.number)
                found.append(self.dataset[place.index])
            seed_all(self.seed, places[0].epoch, places[0].number, len(places))
            return self.collate(found)


def seed_all(*words: int) -> None:
    """Seeds the generators of Python, NumPy and PyTorch by these numbers."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little")
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Within it the process's random numbers may be seeded: behind it they go on as before. A
    worker has no numbers of its own to keep."""
    if get_worker_info() is not None:
        yield
        return
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


__all__ = ["Order", "Place", "SeededDataset", "generators_kept", "seed_all"]
