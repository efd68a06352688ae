"""Modules whose forward does something beside its result that it keeps to itself."""

from __future__ import annotations

import functools
import itertools
import random
from types import SimpleNamespace
from typing import Any

import torch
from forwards import WIDTH, Config, Net

calls = 0
KEPT: dict[str, torch.Tensor] = {}
table: torch.Tensor | None = None


@functools.lru_cache
def steps_of(size: int) -> torch.Tensor:
    return torch.arange(size)[:, None] / 7.0


class Stores(Net):
    """A forward that stores its last output, and a dict of more, for others to look at."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.kept, self.seen = h, {"h": h, "n": len(h.shape)}
        return h


class Lends(Net):
    """A forward that hands a tensor from one module to another within the step."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.linear.kept = h.tanh()  # type: ignore[assignment]
        return h * self.linear.kept  # type: ignore[operator]


class Tabulates(Net):
    """A forward that keeps a table, made for as many tokens as there were and made again for
    more."""

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
    """A forward that keeps a table in a helper object, as models keep rotary positions."""

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


class TabulatesOnAParameter(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        weight: Any = self.linear.weight
        if not hasattr(weight, "steps"):
            weight.steps = torch.arange(64)[:, None] / 7.0
        return h * weight.steps[: h.shape[1]]


class TabulatesByACache(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h * steps_of(64)[: h.shape[1]]


class Freezes(Net):
    """A forward that freezes its own bias from the first step on."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.linear.bias.requires_grad_(False)
        return self.linear(h)


class StoresInTraining(Net):
    """A forward that stores a map in training, which evaluation overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shown", torch.zeros(1), persistent=False)

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.kept, self.shown = h, h.detach()
        if not self.training:
            self.kept = -h
        return h


class AsksForGradients(Net):
    """A forward that asks for gradients; in evaluation it hears what eager code hears under
    `torch.no_grad()`."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h if torch.is_grad_enabled() and h.requires_grad and h.grad_fn is not None else -h


class IteratesAnew(Net):
    """A forward whose iterator starts anew in each run; it draws nothing from its generators."""

    def __init__(self) -> None:
        super().__init__()
        self.dice, self.spare = random.Random(0), itertools.count()

    def step(self, h: torch.Tensor) -> torch.Tensor:
        for factor in iter([1.0, 2.0]):
            h = h * factor
        return h


class Sorts(Net):
    """A forward that draws, and puts the generator back."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        before = random.getstate()
        random.seed(0)
        factor = random.random()
        random.setstate(before)
        return h * factor


TABULATES = [
    TabulatesInAHelper, TabulatesInAGlobal, TabulatesOnceForAll, TabulatesInTheClass,
    TabulatesByACache, TabulatesOnAParameter,
]  # fmt: skip
HARMLESS = [
    Stores, Lends, Tabulates, SetsOnce, SetsTheSame, SetsAConfigOnce, SetsADeepConfig, SetsAGlobal,
    Sorts, IteratesAnew, StoresInTraining, AsksForGradients, Freezes, *TABULATES,
]  # fmt: skip
