"""What a forward does beside its result: harmless, and then the numbers are eager's, or refused."""

from __future__ import annotations

import random
import threading
from typing import Any

import forwards_harmless as harmless
import pytest
import torch
from forwards import BATCH, REFUSED, TOKENS, TRAINING_LEAVES, WIDTH, Net
from forwards_harmless import (
    HARMLESS,
    TABULATES,
    SetsAConfigOnce,
    SetsADeepConfig,
    SetsAGlobal,
    SetsOnce,
    Stores,
    Tabulates,
    TabulatesInTheClass,
)
from loops import OPTIMIZERS, Pair
from torch import nn

import onward


def batches() -> list[dict[str, torch.Tensor]]:
    shapes = [(BATCH, TOKENS, WIDTH), (BATCH, TOKENS + 2, WIDTH), (BATCH, TOKENS, WIDTH)]
    return [{"x": torch.randn(*s), "y": torch.randn(*s)} for s in shapes]


def trainer_of(model: nn.Module) -> onward.Trainer:
    return onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.sample(4)
@pytest.mark.parametrize("evaluates", [False, True], ids=["train", "eval"])
@pytest.mark.parametrize("cls", REFUSED, ids=lambda c: c.__name__)
def test_what_the_next_run_would_do_differently_is_refused(cls: type[Net], evaluates: bool) -> None:
    model = cls()
    before = [p.detach().clone() for p in model.parameters()]
    held = (model.n, list(model.held), dict(model.table), model.kept)
    trainer = trainer_of(model)
    for batch in batches()[:2]:  # a second time too
        with pytest.raises(onward.OnwardError, match=r"the forward "):
            (trainer.eval_step if evaluates else trainer.train_step)(batch)
    assert (model.n, list(model.held), dict(model.table), model.kept) == held
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("cls", TRAINING_LEAVES, ids=lambda c: c.__name__)
def test_what_training_leaves_to_evaluation_is_refused(cls: type[Net]) -> None:
    """A value that training sets and evaluation reads is refused in training; an evaluation alone
    leaves nothing."""
    model = cls()
    trainer, batch = trainer_of(model), batches()[0]
    with torch.no_grad():
        want = model.eval()(**batch)
    torch.testing.assert_close(trainer.eval_step(batch).loss, want)
    model.train()
    with pytest.raises(onward.CaptureError, match="the forward sets model"):
        trainer.train_step(batch)


@pytest.mark.sample(2)
@pytest.mark.parametrize("cls", HARMLESS, ids=lambda c: c.__name__)
def test_what_changes_nothing_trains_as_in_eager(cls: type[Net], captures: list[int]) -> None:
    pair = Pair(cls(), OPTIMIZERS["sgd"])
    for batch in batches():
        pair.step(**batch)
    # a table of the batch's length grows, as in eager; the graph before had made one of its own
    assert len(captures) == (3 if cls is Tabulates else 1)
    batch = batches()[0]
    have = pair.trainer.eval_step(batch).loss
    with torch.no_grad():  # what the captures have left behind is no trouble to eager
        torch.testing.assert_close(have, pair.model.eval()(**batch))


@pytest.mark.parametrize("cls", TABULATES, ids=lambda c: c.__name__)
def test_a_table_of_the_trace_is_not_kept(cls: type[Net]) -> None:
    """A table made during a trace is not left where eager code or the next capture would meet
    it."""
    harmless.KEPT.clear()
    harmless.steps_of.cache_clear()
    harmless.table, TabulatesInTheClass.shared = None, None
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
    def said(model: Any) -> tuple[Any, ...]:
        config = getattr(model, "config", None)
        return getattr(model, "scale", None), getattr(getattr(config, "inner", config), "n", 0)

    harmless.calls = 0
    model = cls()
    trainer_of(model).train_step(batches()[0])
    had, harmless.calls = harmless.calls, 0
    twin = cls()
    twin(**batches()[0])
    assert said(model) == said(twin) and had == harmless.calls


class Scaled(Net):
    """A forward that makes a table once from a number; the table misses it when the number is set
    anew."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.full((WIDTH,), self.scale)
        return h * self.kept


class ScaledOnAParameter(Scaled):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        weight: Any = self.linear.weight
        if not hasattr(weight, "kept"):
            weight.kept = torch.full((WIDTH,), self.scale)
        self.kept = weight.kept
        return h * weight.kept


def scale(model: Any) -> None:
    model.scale = 7.0


def write(model: Any) -> None:
    model.kept.fill_(9.0)


def forget(model: Any) -> None:
    model.kept = None
    vars(model.linear.weight).pop("kept", None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", [scale, write, forget])
@pytest.mark.parametrize("cls", [Scaled, ScaledOnAParameter], ids=lambda c: c.__name__)
def test_a_table_that_a_forward_keeps_is_eagers(cls: type[Net], change: Any) -> None:
    pair = Pair(cls(), OPTIMIZERS["sgd"])
    for batch in batches():
        pair.step(**batch)
        change(pair.model)
        change(pair.twin)


class SetsInTraining(Net):
    """A forward that sets in training a value that evaluation reads."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.n = 2
        return h * (1 + self.n)


class SetsByMode(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.n = 2 if self.training else 3
        return h * self.n


class SetsByBatch(Net):
    """A forward that sets a value in batches of one row and reads it in all: one capture sets what
    the other reads."""

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
        while not ends.wait(0.1):
            random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        trainer_of(Net()).train_step(batches()[0])
    finally:
        ends.set()
        thread.join()
