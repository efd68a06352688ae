"""One order of samples and of their random numbers: for any number of workers, stopped anywhere."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from onward.data import ResumableDataLoader
from onward.errors import OnwardError

EPOCHS, SIZE, BATCH = 3, 11, 4  # a last batch of 3 samples


class Drawing(Dataset[Any]):
    """Samples that draw from each generator there is."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, random.random(), np.random.rand(), torch.rand(2)


def drawing(samples: list[Any]) -> Any:
    """A collate function that draws too, as one that masks tokens."""
    return [*default_collate(samples), torch.rand(3)]


def loader(workers: int = 0, **more: Any) -> ResumableDataLoader:
    settings = {"batch_size": BATCH, "seed": 3, "collate_fn": drawing, **more}
    return ResumableDataLoader(Drawing(), num_workers=workers, **settings)


def digest(batch: Any) -> str:
    return hashlib.sha256(repr([x.tolist() for x in batch]).encode()).hexdigest()


def run(workers: int | Sequence[int] = 0, stops: Sequence[int] = (), **more: Any) -> list[str]:
    """The batches of all epochs, stopped after those of these numbers and gone on in a new loader.
    workers: of each loader, in turn."""
    counts = [workers] if isinstance(workers, int) else list(workers)
    turn = 0
    own, seen = loader(counts[0], **more), []
    while own.epoch < EPOCHS:
        for batch in own:
            seen.append(digest(batch))
            if len(seen) in stops:
                state, turn = own.state_dict(), turn + 1
                own = loader(counts[turn % len(counts)], **more)
                own.load_state_dict(state)
                break
    return seen


WHOLE = run()


def test_the_run_is_what_it_seems() -> None:
    assert len(WHOLE) == EPOCHS * 3
    assert len(set(WHOLE)) == len(WHOLE)  # each epoch has other numbers
    indices = [batch[0].tolist() for batch in loader()]
    assert sorted(chain(*indices)) == list(range(SIZE))
    assert indices != [batch[0].tolist() for batch in loader(seed=4)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker:UserWarning")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_workers_change_nothing(workers: int, persistent: bool) -> None:
    assert run(workers, persistent_workers=persistent) == WHOLE


@pytest.mark.parametrize("stop", range(1, EPOCHS * 3 + 1))
def test_stopped_anywhere(stop: int) -> None:
    """After each batch: in an epoch, at its end, at the end of all."""
    assert run(stops=[stop]) == WHOLE


@pytest.mark.parametrize("workers", [0, 2], ids="{} workers".format)
@pytest.mark.parametrize("stops", [(1, 2), (4, 5, 6), (3, 6), tuple(range(1, 10))], ids=str)
def test_stopped_again_and_again(stops: tuple[int, ...], workers: int) -> None:
    assert run(workers, stops) == WHOLE


def test_workers_that_change_at_each_stop() -> None:
    assert run([0, 2, 1], [2, 4, 5]) == WHOLE


def test_nobody_elses_numbers_decide() -> None:
    random.seed(99)
    np.random.seed(98)
    torch.manual_seed(97)
    assert run() == WHOLE


@pytest.mark.parametrize("workers", [0, 2])
def test_the_processs_own_numbers_do_not_move(workers: int) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    for _ in loader(workers):
        pass
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]


def test_the_position_is_counted_by_who_takes_the_batch() -> None:
    """Workers have made further batches by then."""
    own = loader(2, prefetch_factor=4)
    batches = iter(own)
    next(batches)
    assert (own.epoch, own.samples) == (0, BATCH)
    for _ in range(2):
        next(batches)
    assert (own.epoch, own.samples) == (1, 0)  # the last one is out: the epoch is done
    assert next(batches, None) is None


def test_another_batch_size_goes_on_with_the_same_samples() -> None:
    own = loader()
    first = next(iter(own))[0].tolist()
    other = loader(batch_size=5)
    other.load_state_dict(own.state_dict())
    rest = [batch[0].tolist() for batch in other]
    assert [len(r) for r in rest] == [5, 2]
    whole = [batch[0].tolist() for batch in loader()]
    assert [*first, *chain(*rest)] == list(chain(*whole))


def test_an_incomplete_batch_left_out() -> None:
    own = loader(drop_last=True)
    assert len(own) == 2
    assert [len(batch[0]) for batch in own] == [4, 4]
    assert (own.epoch, own.samples) == (1, 0)
    larger = loader(batch_size=8, drop_last=True)
    larger.load_state_dict({**own.state_dict(), "samples": 4})
    assert list(larger) == []  # 7 samples are left, which are no batch
    assert (larger.epoch, larger.samples) == (2, 0)


def sample_lists(own: ResumableDataLoader) -> list[list[Any]]:
    """The samples of each batch that is left of the epoch, with what they have drawn."""
    return [
        list(zip(*(x.tolist() for x in batch[:-1]), strict=True))
        for batch in own  # the last is what collating draws
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_are_the_batches_of_one_process(ranks: int, workers: int) -> None:
    """The last batch of 11 samples has 3 or 2 of them, for 2 or 3 processes."""
    whole = sample_lists(loader(batch_size=BATCH // 2 * ranks))
    every = [
        loader(workers, batch_size=BATCH // 2, num_replicas=ranks, rank=rank)
        for rank in range(ranks)
    ]
    assert {len(own) for own in every} == {len(whole)}
    shares = [sample_lists(own) for own in every]
    assert {(own.epoch, own.samples) for own in every} == {(1, 0)}
    for parts, want in zip(zip(*shares, strict=True), whole, strict=True):
        have = [sample for part in parts for sample in part]
        assert have == want if len(want) >= ranks else set(map(str, have)) == set(map(str, want))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1 and all(parts)


def test_another_number_of_processes_goes_on_with_the_same_samples() -> None:
    first = loader(batch_size=2, num_replicas=2, rank=1)
    next(iter(first))
    own, whole = loader(), sample_lists(loader())
    own.load_state_dict(first.state_dict())
    assert sample_lists(own) == whole[1:]
    left = loader(batch_size=2, num_replicas=2, rank=0, drop_last=True)
    assert len(left) == 2 and [len(batch[0]) for batch in left] == [2, 2]


def test_a_loop_that_goes_on_behind_a_load_is_refused() -> None:
    own = loader()
    state = own.state_dict()
    batches = iter(own)
    next(batches)
    own.load_state_dict(state)
    with pytest.raises(OnwardError, match="loaded or moved on within a loop over it; fix: begin"):
        next(batches)
    assert [digest(batch) for batch in own] == WHOLE[:3]


@pytest.mark.parametrize(
    ("change", "said"),
    [({"size": 12}, "size=12, but it is 11"), ({"seed": 4}, "seed=4, but it is 3"),
     ({"shuffle": False}, "shuffle=False, but it is True"), ({"samples": 11}, "sample 11: none"),
     ({"samples": -1}, "sample -1: none"), ({"order_sha256": "0"}, "order of epoch 0 is another")],
)  # fmt: skip
def test_another_order_is_refused(change: dict[str, Any], said: str) -> None:
    own = loader()
    next(iter(own))
    with pytest.raises(OnwardError, match=said):
        own.load_state_dict({**own.state_dict(), **change})
    assert own.samples == BATCH


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "generator", "worker_init_fn"])
def test_arguments_that_would_change_the_order(name: str) -> None:
    with pytest.raises(OnwardError, match=f"{name} cannot be given"):
        loader(0, **{name: None})


@pytest.mark.parametrize(
    ("dataset", "settings", "said"),
    [(Drawing(0), {}, "has 0 samples"),
     (Drawing(3), {"drop_last": True}, "has 3 samples, which make no batch of 4"),
     (Drawing(), {"batch_size": 0}, "batch_size is 0"),
     (Drawing(), {"batch_size": True}, "batch_size is True"),
     (Drawing(7), {"drop_last": True, "num_replicas": 2}, "make no batch of 8"),
     (Drawing(), {"num_replicas": 2, "rank": 2}, "rank is 2 of num_replicas 2; fix"),
     (Drawing(), {"num_replicas": 0}, "rank is 0 of num_replicas 0"),
     (iter(()), {"num_replicas": 2}, "num_replicas is 2 for an iterable dataset")],
)  # fmt: skip
def test_what_makes_no_batch(dataset: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(OnwardError, match=said):
        ResumableDataLoader(dataset, **{"batch_size": BATCH, **settings})
