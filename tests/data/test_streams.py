"""Iterable datasets: one order of samples and random numbers, with a worker or without, stopped
anywhere. A plain DataLoader is the oracle for the order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from onward.data import ResumableDataLoader
from onward.errors import OnwardError

EPOCHS, SIZE, BATCH = 3, 11, 4


class Numbers(IterableDataset[Any]):
    """Samples that draw from each generator there is, and leave some out at random."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.epoch = size, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.size):
            yield i + 100 * self.epoch, random.random(), np.random.rand(), torch.rand(2)


class Filtered(Numbers):
    """A stream whose length is drawn: a buffer that is shuffled, with samples left out."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.size))
        random.shuffle(order)
        for i in order:
            if random.random() < 0.8:
                yield i + 100 * self.epoch, random.random(), np.random.rand(), torch.rand(2)


def drawing(samples: list[Any]) -> Any:
    return [*default_collate(samples), torch.rand(3)]


def loader(kind: type[Numbers] = Numbers, workers: int = 0, **more: Any) -> ResumableDataLoader:
    settings = {"batch_size": BATCH, "seed": 3, "collate_fn": drawing, **more}
    return ResumableDataLoader(kind(), num_workers=workers, **settings)


def run(
    kind: type[Numbers] = Numbers,
    workers: Sequence[int] = (0,),
    stops: Sequence[int] = (),
    **more: Any,
) -> list[str]:
    turn, seen = 0, list[str]()
    own = loader(kind, workers[0], **more)
    while own.epoch < EPOCHS:
        for batch in own:
            seen.append(repr([x.tolist() for x in batch]))
            if len(seen) in stops:
                state, turn = own.state_dict(), turn + 1
                own = loader(kind, workers[turn % len(workers)], **more)
                own.load_state_dict(state)
                break
    return seen


WHOLE = {kind: run(kind) for kind in (Numbers, Filtered)}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 11])
def test_samples_come_in_the_order_of_a_plain_loader(size: int, drop_last: bool) -> None:
    plain = DataLoader(Numbers(size), BATCH, drop_last=drop_last)
    wanted = [[n % 100 for n in batch[0].tolist()] for batch in plain]
    own = ResumableDataLoader(Numbers(size), BATCH, drop_last=drop_last)
    if not wanted:
        with pytest.raises(OnwardError, match="no batch"):
            list(own)
        return
    for epoch in range(2):
        assert own.epoch == epoch
        assert [[n % 100 for n in batch[0].tolist()] for batch in own] == wanted
    assert (own.epoch, own.samples) == (2, 0)


@pytest.mark.parametrize("kind", [Numbers, Filtered])
def test_epochs_differ_and_are_told_to_the_dataset(kind: type[Numbers]) -> None:
    assert len(set(WHOLE[kind])) == len(WHOLE[kind])
    own = loader(kind)
    for epoch in range(2):
        assert all(n // 100 == epoch for batch in own for n in batch[0].tolist())


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Numbers, Filtered])
def test_a_worker_changes_nothing(kind: type[Numbers], persistent: bool) -> None:
    assert run(kind, [1], persistent_workers=persistent) == WHOLE[kind]


@pytest.mark.parametrize("kind", [Numbers, Filtered])
def test_stopped_anywhere(kind: type[Numbers]) -> None:
    for stop in range(1, len(WHOLE[kind]) + 1):
        assert run(kind, stops=[stop]) == WHOLE[kind]
    assert run(kind, [0, 1], [2, 3, 5]) == WHOLE[kind]
    assert run(kind, stops=range(1, 9)) == WHOLE[kind]


def test_nobody_elses_numbers_decide_and_ones_own_do_not_move() -> None:
    random.seed(99)
    np.random.seed(98)
    torch.manual_seed(97)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert run() == WHOLE[Numbers]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]


def test_a_stream_that_is_shorter_than_it_was_is_told() -> None:
    own = loader()
    batches = iter(own)
    next(batches)
    next(batches)
    state = own.state_dict()
    shorter = ResumableDataLoader(Numbers(5), BATCH, seed=3)
    shorter.load_state_dict(state)
    with pytest.raises(OnwardError, match="no batch in epoch 0 from sample 8"):
        list(shorter)


@pytest.mark.parametrize(
    ("dataset", "settings", "said"),
    [
        (Numbers(), {"shuffle": True}, "no order to shuffle"),
        (Numbers(), {"num_workers": 2}, "num_workers is 2 for an iterable"),
        ((x for x in range(3)), {}, "cannot be read again"),
        (iter([1, 2]), {}, "cannot be read again"),
        (object(), {}, "cannot be read again"),
        (Numbers(), {"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_what_is_refused(dataset: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(OnwardError, match=said):
        ResumableDataLoader(dataset, **{"batch_size": BATCH, **settings})


def test_a_map_style_position_is_none_of_a_stream() -> None:
    mapped = ResumableDataLoader(list(range(SIZE)), BATCH, seed=3)
    with pytest.raises(OnwardError, match="size=11"):
        loader().load_state_dict(mapped.state_dict())
