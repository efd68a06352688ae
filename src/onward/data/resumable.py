"""ResumableDataLoader: batches of a dataset, with a position that can be saved and gone back to.

    loader = ResumableDataLoader(dataset, batch_size=8, seed=0, num_workers=2)
    trainer.register_for_checkpointing(loader)
    trainer.resume(output_dir)
    while loader.epoch < 3:
        for batch in loader:      # the rest of the epoch
            trainer.train_step(batch)

`torch.utils.data.DataLoader` makes the batches; which samples, in which order, is decided here. The
position is counted when a batch is handed out, not when a worker makes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from onward.data.order import Order, Place, SeededDataset
from onward.data.stream import SeededStream
from onward.errors import OnwardError

_OWN = ("sampler", "batch_sampler", "generator", "worker_init_fn")


class ResumableDataLoader:
    """Batches of a dataset, epoch by epoch.

    dataset: with `__len__` and `__getitem__`; or an iterable one, which is read in its own order,
    again for each epoch and from its beginning after a resume, so that it must give the same
    samples each time. seed: of the order, and of what samples draw at random; the order of an epoch
    is the same for any number of workers, and in any process. shuffle: whether each epoch has an
    order of its own; None: as long as the dataset is not iterable. drop_last: leaves out an epoch's
    last batch where it is smaller. loader: further arguments of `torch.utils.data.DataLoader`, such
    as num_workers, collate_fn and persistent_workers.

    num_replicas, rank: as of torch's DistributedSampler, the number of processes that share each
    batch, and which of them this one is. All give the same dataset and seed; each gets `batch_size`
    samples of a batch of `num_replicas * batch_size`, and the position is that of all. A last batch
    of fewer samples is shared as evenly as can be; where it has less than one for each process,
    some samples are given to two.

    Raises OnwardError for arguments that contradict each other: an iterable dataset has no order
    to shuffle, is read by one worker at most, and is not shared.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        num_replicas: int = 1,
        rank: int = 0,
        **loader: Any,
    ) -> None:
        given: Any = dataset  # of a type that the tests below do not narrow
        streams = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
        _check_share(num_replicas, rank, streams)
        _check(dataset, batch_size, num_replicas, drop_last, loader, streams, shuffle)
        self.batch_size, self.drop_last = batch_size, drop_last
        self.num_replicas, self.rank = num_replicas, rank
        self._whole = batch_size * num_replicas  # samples of a batch of all processes
        size = 0 if streams else len(given)
        self.order = Order(size, seed, not streams and shuffle is not False)
        self._epoch = self._samples = 0
        self._version = 0  # of the position: it was set anew so often
        collate = loader.pop("collate_fn", None) or default_collate
        self._stream: SeededStream | None = None
        # else each loop would move the generator of the process
        loader |= {"collate_fn": _as_it_is, "generator": torch.Generator()}
        if streams:
            self._stream = SeededStream(dataset, batch_size, seed, drop_last, collate)
            self._batches = DataLoader(self._stream, batch_size=None, **loader)
        else:
            seeded = SeededDataset(dataset, seed, collate)
            self._batches = DataLoader(seeded, batch_sampler=_Batches(self), **loader)

    @property
    def epoch(self) -> int:
        """Epochs done: the number of the one that the next batch belongs to."""
        return self._epoch

    @property
    def samples(self) -> int:
        """Samples of the epoch that were handed out, to all processes that share them."""
        return self._samples

    def __len__(self) -> int:
        """Batches of a whole epoch. Raises TypeError for an iterable dataset."""
        if self._stream is not None:
            raise TypeError("the length of an iterable dataset is not known")
        size, batch = self.order.size, self._whole
        return size // batch if self.drop_last else -(-size // batch)

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of the epoch. Behind the last one the next epoch begins.

        Raises OnwardError where a state was loaded meanwhile: batches that were made before belong
        to another position.
        """
        if self._stream is not None:
            yield from self._streamed(self._stream)
            return
        version, places, first = self._version, self.places(), self._samples
        made = iter(self._batches)
        left = self._batches_left()
        if not left:  # of fewer samples than a batch, which drop_last leaves out
            self._next_epoch()
        for number, _ in enumerate(places, 1):
            found = next(made)
            self._require(version)
            self._samples = min(first + number * self._whole, self.order.size)
            if number == left:  # the epoch ends with the batch, not with a look behind it
                version = self._next_epoch()
            yield found
            self._require(version)
        for _ in made:  # lets persistent workers finish their epoch
            pass

    def _streamed(self, stream: SeededStream) -> Iterator[Any]:
        """The batches that are left of an iterable dataset's epoch."""
        version = self._version
        stream.place[:] = torch.tensor([self._epoch, self._samples])
        given = False
        for found in self._batches:
            given = True
            self._require(version)
            self._samples += found.samples
            if found.is_last:  # the epoch ends with the batch, not with a look behind it
                version = self._next_epoch()
            yield found.batch
            self._require(version)
        if not given:
            raise OnwardError(
                f"the dataset has no batch in epoch {self._epoch} from sample {self._samples} on; "
                "fix: give one that can be iterated again, with as many samples as before"
            )

    def places(self) -> Iterator[list[Place]]:
        """This process's samples of each batch that is left of the epoch, as the position is
        now."""
        epoch, indices = self._epoch, self.order.indices(self._epoch)
        first, size, count = self._samples, self._whole, self._batches_left()

        def batch(start: int) -> list[Place]:
            taken = indices[start : start + size].tolist()
            return self._share([Place(epoch, start + i, index) for i, index in enumerate(taken)])

        return map(batch, range(first, first + count * size, size))

    def _share(self, places: list[Place]) -> list[Place]:
        """This process's samples of a batch of all: those of the first process come first."""
        count, ranks, rank = len(places), self.num_replicas, self.rank
        own = places[count * rank // ranks : count * (rank + 1) // ranks]
        return own or [places[rank % count]]

    def _batches_left(self) -> int:
        left = self.order.size - self._samples
        return left // self._whole if self.drop_last else -(-left // self._whole)

    def _next_epoch(self) -> int:
        """Goes to the next epoch. Returns the version of that position."""
        self._epoch, self._samples = self._epoch + 1, 0
        self._version += 1
        return self._version

    def end_epoch(self) -> None:
        """Goes to the next epoch, and leaves out what is left of this one. A loop over the loader
        that is under way has to be begun anew."""
        self._next_epoch()

    # ---- saved and restored

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order is made of."""
        return {
            "epoch": self._epoch,
            "samples": self._samples,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            "size": self.order.size,
            "order_sha256": self.order.sha256(self._epoch),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position. Raises OnwardError, and stays where it is, where the dataset,
        the seed or shuffling are others, so that samples would be seen twice or never."""
        own = self.order
        for name, here in (("size", own.size), ("seed", own.seed), ("shuffle", own.shuffle)):
            if state.get(name) != here:
                raise OnwardError(
                    f"the position of the data was saved with {name}={state.get(name)!r}, but it "
                    f"is {here!r} here, so that the order of samples is another; fix: give the "
                    "same dataset, seed and shuffle"
                )
        epoch, samples = state["epoch"], state["samples"]
        least = samples + 1 if self._stream is not None else own.size
        if not 0 <= samples < least or epoch < 0:
            raise OnwardError(f"the position of the data is epoch {epoch}, sample {samples}: none")
        if state["order_sha256"] != own.sha256(epoch):
            raise OnwardError(
                f"the order of epoch {epoch} is another than when the position was saved; fix: use "
                "the version of NumPy that it was saved with"
            )
        self._epoch, self._samples = epoch, samples
        self._version += 1

    def _require(self, version: int) -> None:
        if version != self._version:
            raise OnwardError(
                "the position of the data was loaded or moved on within a loop over it; fix: begin "
                "a new loop over the loader"
            )


def _check_share(num_replicas: int, rank: int, streams: bool) -> None:
    """Raises OnwardError for a share of the batches that there is not."""
    numbers = [type(n) is int for n in (num_replicas, rank)]
    if not all(numbers) or num_replicas < 1 or not 0 <= rank < num_replicas:
        raise OnwardError(
            f"rank is {rank!r} of num_replicas {num_replicas!r}; fix: a whole number of processes, "
            "1 or more, and a number below it"
        )
    if streams and num_replicas > 1:
        raise OnwardError(
            f"num_replicas is {num_replicas} for an iterable dataset, of which each process would "
            "read the whole; fix: leave num_replicas out, and give each process its own samples, "
            "such as by datasets.distributed.split_dataset_by_node"
        )


def _check(
    dataset: Any,
    batch_size: int,
    num_replicas: int,
    drop_last: bool,
    loader: Mapping[str, Any],
    streams: bool,
    shuffle: bool | None,
) -> None:
    """Raises OnwardError for arguments of a loader that are invalid or contradict each other."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OnwardError(f"batch_size is {batch_size!r}; fix: a whole number, 1 or more")
    odd = [name for name in _OWN if name in loader]
    if odd:
        raise OnwardError(
            f"{odd[0]} cannot be given to a ResumableDataLoader, whose seed decides order and "
            "random numbers; fix: leave it out"
        )
    if streams:
        if shuffle:
            raise OnwardError(
                "an iterable dataset has no order to shuffle; fix: shuffle=None, and shuffle in "
                "the dataset, by its set_epoch(epoch)"
            )
        if loader.get("num_workers", 0) > 1:
            raise OnwardError(
                f"num_workers is {loader['num_workers']} for an iterable dataset, whose samples "
                "several workers would share out in an order of their own; fix: 0 or 1"
            )
        if isinstance(dataset, Iterator) or not hasattr(dataset, "__iter__"):
            raise OnwardError(
                f"the dataset is a {type(dataset).__name__}, which cannot be read again for the "
                "next epoch; fix: an object whose __iter__ begins anew, such as an IterableDataset"
            )
    elif len(dataset) < (batch_size * num_replicas if drop_last else 1):
        raise OnwardError(
            f"the dataset has {len(dataset)} samples, which make no batch of "
            f"{batch_size * num_replicas}; "
            "fix: give more data, or a smaller batch_size"
        )


class _Batches:
    """The batches that are left, as a DataLoader's workers are sent them."""

    def __init__(self, loader: ResumableDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Place]]:
        return self._loader.places()

    def __len__(self) -> int:
        return len(self._loader)


def _as_it_is(batch: Any) -> Any:
    """Stands for a collate function where the dataset has collated."""
    return batch


__all__ = ["ResumableDataLoader"]
