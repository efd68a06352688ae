"""What a forward does beside its result: harmless, and then the numbers are eager's, or refused."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loops import OPTIMIZERS, Pair
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onward

WIDTH, BATCH, TOKENS = 8, 3, 5
calls = 0  # of a forward that counts them here
DICE = random.Random(0)
KEPT: dict[str, torch.Tensor] = {}
table: torch.Tensor | None = None


@functools.lru_cache
def steps_of(size: int) -> torch.Tensor:
    return torch.arange(size)[:, None] / 7.0


class Net(nn.Module):
    """A linear layer and a loss, between which `step` comes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.n, self.held, self.table = 0, [], {"n": 0}
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.step(self.linear(x)), y)

    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h


class Config:
    n = 0


class Counts(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return h * self.n


class CountsNow(Net):
    """Nothing is seen of it in the first 100 steps."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return h * 2 if self.n > 100 else h


class CountsInATable(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.table["n"] += 1
        return h * self.table["n"]


class CountsInAConfig(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.config.n += 1
        return h * self.config.n


class CountsInTheClass(Net):
    times = 0

    def step(self, h: torch.Tensor) -> torch.Tensor:
        type(self).times += 1
        return h * self.times


class CountsInAGlobal(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        global calls
        calls += 1
        return h * calls


class CountsInPrivate(Net):
    def __init__(self) -> None:
        super().__init__()
        self._n = [0]

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self._n[0] += 1
        return h * self._n[0]


class CountsInADeepConfig(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(inner=SimpleNamespace(n=[0]))

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.config.inner.n[0] += 1
        return h * self.config.inner.n[0]


class CountsInAnArray(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(1, dtype=np.int64)

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.counts[0] += 1
        return h * int(self.counts[0])


class CountsInBytes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counts = array("l", [0])

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.counts[0] += 1
        return h * self.counts[0]


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class CountsInASlot(Net):
    def __init__(self) -> None:
        super().__init__()
        self.slotted = Slotted()

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.slotted.n += 1
        return h * self.slotted.n


class CountsInAFunction(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        counted.n += 1  # type: ignore[attr-defined]
        return h * counted.n  # type: ignore[attr-defined]


def counted() -> None: ...


counted.n = 0  # type: ignore[attr-defined]


class CountsInAClosure(Net):
    def __init__(self) -> None:
        super().__init__()
        n = 0

        def count() -> int:
            nonlocal n
            n += 1
            return n

        self.count = count

    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.count()


class CountsInADefault(Net):
    def step(self, h: torch.Tensor, n: list[int] = [0]) -> torch.Tensor:  # noqa: B006
        n[0] += 1
        return h * n[0]


class CountsBelow(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counts()

    def step(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner.step(h)


class Flips(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.n = 1 - self.n
        return h if self.n else -h


class Appends(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.held.append(h.shape)
        return h


class Remembers(Net):
    """Reads what the last step has left."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        before, self.kept = self.kept, h.detach()
        return h if before is None else h + before


class RemembersInAList(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        before, self.held[:] = list(self.held), [h.detach()]
        return h + before[0] if before else h


class Draws(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h if random.random() < 0.5 else -h


class DrawsFromNumpy(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h * float(np.random.rand())


class DrawsFromItsOwn(Net):
    """One class per source of values below."""

    source: Any

    def __init__(self) -> None:
        super().__init__()
        self.dice = type(self).source()

    def step(self, h: torch.Tensor) -> torch.Tensor:
        draw = getattr(self.dice, "random", None) or getattr(self.dice, "rand", None)
        return h * float(draw() if draw else next(self.dice))


SOURCES: dict[str, Any] = {
    "random": lambda: random.Random(0), "generator": lambda: np.random.default_rng(0),
    "twister": lambda: np.random.Generator(np.random.MT19937(0)),
    "philox": lambda: np.random.Generator(np.random.Philox(0)),
    "state": lambda: np.random.RandomState(0), "count": lambda: itertools.count(1),
    "list": lambda: iter([*range(1, 99)]), "range": lambda: iter(range(1, 99)),
    "dict": lambda: iter(dict.fromkeys(range(1, 99))), "yields": lambda: (i for i in range(1, 99)),
    "nested": lambda: (i for part in (range(1, 50), range(50, 99)) for i in part),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "chain": lambda: itertools.chain([1], range(2, 99)),
    "map": lambda: map(abs, range(-99, -1)), "islice": lambda: itertools.islice(range(1, 99), 90),
    "zip": lambda: (a for (a,) in zip(range(1, 99), strict=True)),
    "accumulate": lambda: itertools.accumulate(range(1, 99)),
}  # fmt: skip
OF_ITS_OWN = [
    type(f"DrawsFrom_{name}", (DrawsFromItsOwn,), {"source": staticmethod(make)})
    for name, make in SOURCES.items()
]


class DrawsFromAGlobal(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h * DICE.random()


class Seeds(Net):
    """Dropout then has the same mask in each step."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return F.dropout(h, 0.5, True)


class SeedsInAFork(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.random.seed()
            return F.dropout(h, 0.5, True)


class PutsBack(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        h = F.dropout(h, 0.5, True)
        torch.set_rng_state(state)
        return h


class DrawsFromAGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.randn(WIDTH, generator=self.generator)


class Reenters(Net):
    """Below a reentrant checkpoint, gradients do not belong to the graph that is traced."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.tanh, h, use_reentrant=True) + h  # type: ignore[operator]


class Stores(Net):
    """The last output, and a dict of more of them, for others to look at."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.kept, self.seen = h, {"h": h, "n": len(h.shape)}
        return h


class Lends(Net):
    """A tensor from one module to another, within the step."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.linear.kept = h.tanh()  # type: ignore[assignment]
        return h * self.linear.kept  # type: ignore[operator]


class Tabulates(Net):
    """A table made once, for as many tokens as there were."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.n < h.shape[1]:
            self.n = int(h.shape[1])
            self.kept = torch.arange(self.n)[:, None] * torch.ones(WIDTH)
        return h * self.kept[: h.shape[1]]


class SetsOnce(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale = h.shape[-1] ** -0.5
        return h * self.scale


class SetsTheSame(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.scale = 1.0 / float(h.shape[-1])
        return h * self.scale


class SetsAConfigOnce(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.config.n = 3
        return h * self.config.n


class SetsADeepConfig(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(inner=Config())

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.config.inner.n = 3
        return h * self.config.inner.n


class SetsAGlobal(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        global calls
        calls = 4
        return h * calls


class TabulatesInAHelper(Net):
    """As rotary positions are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = SimpleNamespace(cache={})

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if "k" not in self.rope.cache:
            self.rope.cache["k"] = torch.arange(64)[:, None] / 7.0
        return h * self.rope.cache["k"][: h.shape[1]]


class TabulatesInAGlobal(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        if "k" not in KEPT:
            KEPT["k"] = torch.arange(64)[:, None] / 7.0
        return h * KEPT["k"][: h.shape[1]]


class TabulatesOnceForAll(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        global table
        if table is None:
            table = torch.arange(64)[:, None] / 7.0
        return h * table[: h.shape[1]]


class TabulatesInTheClass(Net):
    shared: torch.Tensor | None = None

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.shared is None:
            type(self).shared = torch.arange(64)[:, None] / 7.0
        assert self.shared is not None
        return h * self.shared[: h.shape[1]]


class TabulatesByACache(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h * steps_of(64)[: h.shape[1]]


class AsksForGradients(Net):
    """As eager code under `torch.no_grad()` finds it, in evaluation."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h if torch.is_grad_enabled() and h.requires_grad and h.grad_fn is not None else -h


class IteratesAnew(Net):
    """What it iterates over begins anew in each run; what it could draw from, it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.dice, self.spare = random.Random(0), itertools.count()

    def step(self, h: torch.Tensor) -> torch.Tensor:
        for factor in iter([1.0, 2.0]):
            h = h * factor
        return h


class Sorts(Net):
    """Draws, and puts the generator back."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        before = random.getstate()
        random.seed(0)
        factor = random.random()
        random.setstate(before)
        return h * factor


REFUSED = [
    Counts, CountsNow, CountsInATable, CountsInAConfig, CountsInTheClass, CountsInAGlobal,
    CountsBelow, Flips, Appends, Remembers, RemembersInAList, Draws, DrawsFromNumpy, Reenters,
    CountsInPrivate, CountsInADeepConfig, CountsInAnArray, CountsInBytes, CountsInASlot,
    CountsInAFunction, CountsInAClosure, CountsInADefault, DrawsFromAGlobal, *OF_ITS_OWN,
    Seeds, SeedsInAFork, PutsBack, DrawsFromAGenerator,
]  # fmt: skip
TABULATES = [
    TabulatesInAHelper, TabulatesInAGlobal, TabulatesOnceForAll, TabulatesInTheClass,
    TabulatesByACache,
]  # fmt: skip
HARMLESS = [
    Stores, Lends, Tabulates, SetsOnce, SetsTheSame, SetsAConfigOnce, SetsADeepConfig, SetsAGlobal,
    Sorts, IteratesAnew, AsksForGradients, *TABULATES,
]  # fmt: skip


def batches() -> list[dict[str, torch.Tensor]]:
    shapes = [(BATCH, TOKENS, WIDTH), (BATCH, TOKENS + 2, WIDTH), (BATCH, TOKENS, WIDTH)]
    return [{"x": torch.randn(*s), "y": torch.randn(*s)} for s in shapes]


def trainer_of(model: nn.Module) -> onward.Trainer:
    return onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.sample(2)
@pytest.mark.parametrize("evaluates", [False, True], ids=["train", "eval"])
@pytest.mark.parametrize("cls", REFUSED, ids=lambda c: c.__name__)
def test_what_the_next_run_would_do_differently_is_refused(cls: type[Net], evaluates: bool) -> None:
    model = cls()
    before = [p.detach().clone() for p in model.parameters()]
    held = (model.n, list(model.held), dict(model.table), model.kept)
    trainer = trainer_of(model)
    for batch in batches()[:2]:  # a second time too
        with pytest.raises(onward.OnwardError, match=r"the forward |use_reentrant"):
            (trainer.eval_step if evaluates else trainer.train_step)(batch)
    assert (model.n, list(model.held), dict(model.table), model.kept) == held
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("cls", HARMLESS, ids=lambda c: c.__name__)
def test_what_changes_nothing_trains_as_in_eager(cls: type[Net], captures: list[int]) -> None:
    pair = Pair(cls(), OPTIMIZERS["sgd"])
    for batch in batches():
        pair.step(**batch)
    assert len(captures) == (2 if cls is Tabulates else 1)  # whose table is of the batch's length
    batch = batches()[0]
    have = pair.trainer.eval_step(batch).loss
    with torch.no_grad():  # what the captures have left behind is no trouble to eager
        torch.testing.assert_close(have, pair.model.eval()(**batch))


@pytest.mark.parametrize("cls", TABULATES, ids=lambda c: c.__name__)
def test_a_table_of_the_trace_is_not_kept(cls: type[Net]) -> None:
    """Nowhere that eager code, or the next capture, would meet it."""
    global table
    KEPT.clear()
    steps_of.cache_clear()
    table, TabulatesInTheClass.shared = None, None
    batch = batches()[0]
    torch.manual_seed(0)
    model = cls()
    loss = trainer_of(model).eval_step(batch).loss
    torch.testing.assert_close(loss, model(**batch).detach())


def test_no_tensor_of_the_trace_stays_in_the_model() -> None:
    model = Stores()
    trainer = trainer_of(model)
    trainer.train_step(batches()[0])
    assert model.kept is None and not hasattr(model, "seen")
    assert any("kept" in note and "seen" in note for note in trainer.report()["notes"])


@pytest.mark.parametrize("cls", [SetsOnce, SetsAConfigOnce, SetsADeepConfig, SetsAGlobal])
def test_numbers_that_a_forward_sets_stay_as_in_eager(cls: type[Net]) -> None:
    global calls

    def said(model: Any) -> tuple[Any, ...]:
        config = getattr(model, "config", None)
        return getattr(model, "scale", None), getattr(getattr(config, "inner", config), "n", 0)

    calls = 0
    model = cls()
    trainer_of(model).train_step(batches()[0])
    had, calls = calls, 0
    twin = cls()
    twin(**batches()[0])
    assert said(model) == said(twin) and had == calls


class SetsInTraining(Net):
    """What evaluation reads."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.n = 2
        return h * (1 + self.n)


class SetsByMode(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.n = 2 if self.training else 3
        return h * self.n


class SetsByBatch(Net):
    """Of one row, or more: two captures, of which one sets what the other reads."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if h.shape[0] == 1:
            self.n = 2
        return h * (1 + self.n)


@pytest.mark.parametrize("cls", [SetsInTraining, SetsByMode, SetsByBatch], ids=lambda c: c.__name__)
def test_a_graph_reads_what_another_capture_has_set(cls: type[Net]) -> None:
    def row() -> dict[str, torch.Tensor]:
        return {"x": torch.randn(1, TOKENS, WIDTH), "y": torch.randn(1, TOKENS, WIDTH)}

    pair = Pair(cls(), OPTIMIZERS["sgd"])
    for batch in [batches()[0], row(), batches()[0], row(), batches()[0]]:
        have = pair.trainer.eval_step(batch).loss
        with torch.no_grad():
            torch.testing.assert_close(have, pair.twin.eval()(**batch))
        pair.twin.train()
        pair.step(**batch)
    assert pair.model.n == pair.twin.n


def test_random_numbers_of_another_thread_are_no_matter() -> None:
    ends = threading.Event()

    def draw() -> None:
        while not ends.wait(0.02):
            random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        trainer_of(Net()).train_step(batches()[0])
    finally:
        ends.set()
        thread.join()
