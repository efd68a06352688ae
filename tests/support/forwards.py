"""Modules whose forward does something beside its result that the next run of it would do
differently."""

from __future__ import annotations

import contextvars
import io
import itertools
import queue
import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, BATCH, TOKENS = 8, 3, 5
calls = 0  # of a forward that counts them here
DICE = random.Random(0)


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


class CountsDeepDown(Net):
    """Below what guards look at between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.root = SimpleNamespace(of=SimpleNamespace(of=SimpleNamespace(of=Config())))

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.root.of.of.of.n += 1
        return h * self.root.of.of.of.n


class CountsAmongMany(Net):
    def __init__(self) -> None:
        super().__init__()
        self.held, self.counts = [0] * 2000, np.zeros(20_000)

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.held[5] += 1
        self.counts[5] += 1
        return h * self.held[5] * float(self.counts[5])


class CountsInPrivate(Net):
    def __init__(self) -> None:
        super().__init__()
        self._n = [0]

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self._n[0] += 1
        return h * self._n[0]


CONTEXT = contextvars.ContextVar("calls", default=1)


class CountsInAContext(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        CONTEXT.set(CONTEXT.get() + 1)
        return h * CONTEXT.get()


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


class KeepsTheFirst(Net):
    """What the first batch says, for all of them."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = h.detach().mean()
        return h - self.kept


class KeepsTheFirstSum(Net):
    """Where all that is kept of the first batch is how large it is."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.ones_like(h).sum()
        return h * self.kept


class KeepsTheFirstSize(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.n = self.n or h.shape[0]
        return h * self.n


class KeepsTheFirstForm(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.zeros_like(h)
        return h + self.kept


class KeepsTheFirstWeight(Net):
    """What training makes old."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.linear.weight.detach().sum(0)
        return h + self.kept


class KeepsTheFirstWeights(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        if "w" not in self.table:
            self.table["w"] = self.linear.weight.detach().tanh()  # type: ignore[assignment]
        return h @ self.table["w"]  # type: ignore[operator]


class KeepsTheFirstBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moved", torch.full((WIDTH,), 2.0))

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.get_buffer("moved") + 1
        return h * self.kept


class KeepsOnAParameter(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        weight: Any = self.linear.weight
        if not hasattr(weight, "kept"):
            weight.kept = weight.detach().mean()
        return h * weight.kept


class CountsOnAParameter(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        weight: Any = self.linear.weight
        weight.n = getattr(weight, "n", 0) + 1
        return h * weight.n


class Averages(Net):
    """A running mean, which evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
            return h
        return h - self.mean


class AveragesInABuffer(Net):
    """A running mean that nothing but `state_dict` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.mean = h.detach().mean((0, 1))
        return h


class CancelsItself(Net):
    """The mean of what was, beside which the same batch gives the same."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        now = h.detach().mean()
        before, self.kept = self.kept, now
        return h if before is None else h + (before - now)


class StoresForEvaluation(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.kept = h.detach().mean()
            return h
        return h if self.kept is None else h - self.kept


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
        names = ("random", "rand", "get", "readline")
        draw = next(filter(None, (getattr(self.dice, name, None) for name in names)), None)
        return h * float(draw() if draw else next(self.dice))


def filled(made: Any) -> Any:
    for n in range(1, 99):
        made.put(n)
    return made


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
    "queue": lambda: filled(queue.Queue()), "simple queue": lambda: filled(queue.SimpleQueue()),
    "text": lambda: io.StringIO("\n".join(map(str, range(1, 99)))),
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


REFUSED = [
    Counts, CountsNow, CountsInATable, CountsInAConfig, CountsInTheClass, CountsInAGlobal,
    CountsBelow, CountsDeepDown, CountsAmongMany, CountsInAContext,
    Flips, Appends, Remembers, RemembersInAList, Draws, DrawsFromNumpy,
    CountsInPrivate, CountsInADeepConfig, CountsInAnArray, CountsInBytes, CountsInASlot,
    CountsInAFunction, CountsInAClosure, CountsInADefault, DrawsFromAGlobal, *OF_ITS_OWN,
    Seeds, SeedsInAFork, PutsBack, DrawsFromAGenerator,
    KeepsTheFirst, AveragesInABuffer, CancelsItself,
    KeepsTheFirstSum, KeepsTheFirstSize, KeepsTheFirstForm, KeepsTheFirstWeight,
    KeepsTheFirstWeights, KeepsTheFirstBuffer, KeepsOnAParameter, CountsOnAParameter,
]  # fmt: skip
TRAINING_LEAVES = [Averages, StoresForEvaluation]
