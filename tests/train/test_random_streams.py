"""Whose random numbers a Trainer draws: its own, by torch's seed and the number of the window."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import alike, assert_refused
from torch import nn

import onward
from onward import OnwardError

pytestmark = pytest.mark.usefixtures("captures_kept")

F = nn.functional
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))

DRAWS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "nothing": lambda m, h: h,
    "Dropout": lambda m, h: m.drop(h),
    "dropout of 0": lambda m, h: F.dropout(h, 0.0, training=True),
    "rand": lambda m, h: h + torch.rand(h.shape),
    "randn_like": lambda m, h: h + torch.randn_like(h),
    "bernoulli": lambda m, h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "gumbel_softmax": lambda m, h: F.gumbel_softmax(h),
}
REFUSED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "Python's": lambda m, h: h * random.random(),
    "numpy's": lambda m, h: h * float(np.random.rand()),
}


class Net(nn.Module):
    def __init__(self, draws: str = "Dropout") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.w = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.drop = nn.Dropout(0.4)
        self.draws = draws

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss({**DRAWS, **REFUSED}[self.draws](self, torch.tanh(x @ self.w)), y)


def trainer_of(draws: str = "Dropout", lr: float = 0.0, **options: Any) -> onward.Trainer:
    model = Net(draws).train()
    return onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=lr), options=options)


def losses(trainer: onward.Trainer, count: int) -> list[float]:
    return [float(trainer.train_step(X, Y).loss) for _ in range(count)]


def states() -> dict[str, Any]:
    """The state of every generator that a user's loop may read."""
    return {
        "torch": torch.get_rng_state(), "python": random.getstate(),
        "numpy": repr(np.random.get_state(legacy=False)),
    }  # fmt: skip


# ---- no generator is moved


METHODS: dict[str, Callable[[onward.Trainer, Path], Any]] = {
    "train_step": lambda t, to: t.train_step(X, Y),
    "another": lambda t, to: t.train_step(X[:4], Y[:4]),
    "eval_step": lambda t, to: t.eval_step(X, Y),
    "verify": lambda t, to: t.verify(X, Y),
    "explain": lambda t, to: str(t.explain(X, Y)),
    "profile": lambda t, to: t.profile(),
    "report": lambda t, to: t.report(),
    "plan": lambda t, to: str(t.plan),
    "state_dict": lambda t, to: t.load_state_dict(t.state_dict()),
    "export_onnx": lambda t, to: t.export_onnx(to / "model.onnx"),
}


@pytest.mark.parametrize("draws", [*DRAWS, *REFUSED])
def test_no_method_moves_a_generator(draws: str, tmp_path: Path) -> None:
    trainer = trainer_of(draws, lr=0.1)
    torch.randn(3)  # of which torch keeps a fourth
    for name, method in METHODS.items():
        before = states()
        try:
            method(trainer, tmp_path)
        except OnwardError as error:  # noise, which has no reference to verify by
            assert draws in REFUSED or "draws random numbers" in str(error)
        assert alike(states(), before), name


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("draws", ["nothing", "Dropout"])
def test_data_are_drawn_as_if_the_step_drew_nothing(draws: str, window: int) -> None:
    """Batches of a shuffling loader, and noise on them, are drawn as if the step drew nothing."""
    rows = list(torch.arange(24.0).reshape(12, 2))

    def batches(step: Callable[[torch.Tensor, torch.Tensor], Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        found = []
        for _ in range(2):
            for batch in torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True):  # type: ignore[arg-type]
                x = torch.cat([batch, torch.randn_like(batch)], 1)
                found.append(x)
                step(x, torch.zeros_like(x))
                found.append(torch.rand(2))
        return [*found, torch.get_rng_state()]

    trainer = trainer_of(draws, lr=0.1, gradient_accumulation_steps=window)
    assert alike(batches(trainer.train_step), batches(lambda x, y: None))


# ---- what decides


def test_torch_s_seed_decides_and_each_window_has_a_number_of_its_own() -> None:
    runs = []
    for seed in (11, 11, 12):
        torch.manual_seed(seed)
        runs.append(losses(trainer_of(), 4))
    assert runs[0] == runs[1]
    assert len({*runs[0], *runs[2]}) == 8
    torch.manual_seed(11)
    torch.rand(1000)  # what else is drawn does not count
    assert losses(trainer_of(), 2) == runs[0][:2]
    state = torch.get_rng_state()
    torch.manual_seed(12)
    torch.set_rng_state(state)
    assert losses(trainer_of(), 2) == runs[0][:2]


def test_another_seed_decides_from_the_next_window_on() -> None:
    torch.manual_seed(11)
    whole = losses(trainer_of(), 4)
    torch.manual_seed(12)
    other = losses(trainer_of(), 4)
    torch.manual_seed(11)
    trainer = trainer_of()
    found = losses(trainer, 1)
    torch.manual_seed(12)
    found += losses(trainer, 2)
    torch.manual_seed(11)
    assert found + losses(trainer, 1) == [whole[0], *other[1:3], whole[3]]
    torch.manual_seed(11)
    trainer = trainer_of()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        found = losses(trainer, 1)
    assert found + losses(trainer, 2) == [other[0], *whole[1:3]]


def test_micro_batches_of_a_window_share_a_seed() -> None:
    """The micro-batches of a window share a seed, also where torch is seeded within it."""
    torch.manual_seed(11)
    trainer, seeds = trainer_of(gradient_accumulation_steps=2), []
    for i in range(4):
        losses(trainer, 1)
        seeds.append(tuple(trainer.state_dict()["seed"].tolist()))
        torch.manual_seed(20 + i)
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_a_step_that_fails_gives_its_number_back() -> None:
    torch.manual_seed(11)
    want = losses(trainer_of(), 3)
    torch.manual_seed(11)
    trainer = trainer_of()
    found = losses(trainer, 1)
    for wrong in (X[:, :3], X.long()):
        with pytest.raises((OnwardError, RuntimeError)):
            trainer.train_step(wrong, Y)
    assert found + losses(trainer, 2) == want


def test_updates_that_are_left_out_have_numbers_too() -> None:
    torch.manual_seed(11)
    want = losses(trainer_of(), 1)
    trainer, seeds = trainer_of(), []
    for scale in (float("nan"), float("inf"), 1.0, float("nan"), 1.0):
        trainer.train_step(X * scale, Y)
        seeds.append(tuple(trainer.state_dict()["seed"].tolist()))
    assert trainer.updates == 2
    assert len(set(seeds)) == 5
    assert losses(trainer, 1) != want


# ---- resumed


def _torch_s(trainer: onward.Trainer) -> Any:
    saved = copy.deepcopy((trainer.model.state_dict(), trainer.optimizer.state_dict()))
    rng = torch.get_rng_state()

    def load(other: onward.Trainer) -> None:
        other.model.load_state_dict(saved[0])
        other.optimizer.load_state_dict(saved[1])
        torch.set_rng_state(rng)

    return load


def _state_dict(trainer: onward.Trainer) -> Any:
    saved = copy.deepcopy(trainer.state_dict())
    return lambda other: other.load_state_dict(saved)


def _and_torch_s_random_state(trainer: onward.Trainer) -> Any:
    saved, rng = copy.deepcopy(trainer.state_dict()), torch.get_rng_state()

    def load(other: onward.Trainer) -> None:
        other.load_state_dict(saved)
        torch.set_rng_state(rng)

    return load


WAYS = {
    "torch's own state": _torch_s,
    "state_dict": _state_dict,
    "state_dict and the random state": _and_torch_s_random_state,
}


def adam(window: int = 1) -> onward.Trainer:
    model = Net().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return onward.Trainer(model, optimizer, options={"gradient_accumulation_steps": window})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window, at", [(1, 3), (2, 2), (2, 3)])
def test_a_run_that_is_resumed_is_the_whole_run(way: str, window: int, at: int) -> None:
    """A resumed run is the whole run bit for bit, with dropout, twice, and with unrelated draws in
    between."""
    if way == "torch's own state" and at % window:
        pytest.skip("it has no window that is open")
    torch.manual_seed(7)
    whole = adam(window)
    losses(whole, at)
    load = WAYS[way](whole)
    torch.rand(3)
    want = losses(whole, 6)
    torch.manual_seed(99)
    first = adam(window)
    losses(first, window)
    load(first)
    torch.rand(2)
    assert losses(first, 2) == want[:2]
    torch.manual_seed(98)
    load(first)
    losses(first, 2)
    load = WAYS[way](first)
    torch.manual_seed(97)
    second = adam(window)
    load(second)
    assert losses(second, 4) == want[2:]
    assert alike(second.model.state_dict(), whole.model.state_dict())


def test_a_seed_after_a_state_decides() -> None:
    torch.manual_seed(7)
    trainer = trainer_of()
    losses(trainer, 2)
    saved = trainer.state_dict()
    torch.manual_seed(12)
    want = losses(trainer, 1)
    torch.manual_seed(5)
    other = trainer_of()
    other.load_state_dict(saved)
    torch.manual_seed(12)
    assert losses(other, 1) == want


def test_states_of_before_are_read() -> None:
    """States saved by older versions lack the stream: torch's seed decides, or the generator they
    hold."""
    new = ("stream", "left_out", "evaluations")
    kinds: list[dict[str, Any]] = [{}, {"seed": 3}]
    for options in kinds:
        torch.manual_seed(7)
        trainer = trainer_of(**options)
        losses(trainer, 2)
        saved = {k: v for k, v in trainer.state_dict().items() if k not in new}
        want = losses(trainer, 2)
        torch.manual_seed(7)
        changed: dict[str, Any] = dict.fromkeys(options, 9)
        other = trainer_of(**changed)
        other.load_state_dict(saved)
        assert losses(other, 2) == want


def test_a_stream_that_does_not_fit_is_refused() -> None:
    trainer = trainer_of()
    losses(trainer, 1)
    assert_refused(
        trainer,
        trainer.state_dict(),
        {
            "stream of one": lambda s: s.update(stream=[1]),
            "stream is a number": lambda s: s.update(stream=1),
            "stream is negative": lambda s: s.update(stream=[0, -1]),
            "stream is too large": lambda s: s.update(stream=[2**64, 0]),
            "left_out is a float": lambda s: s.update(left_out=0.5),
            "evaluations are none": lambda s: s.update(evaluations=None),
        },
    )


# ---- evaluation


@pytest.mark.parametrize("options", [{}, {"seed": 3}])
def test_an_evaluation_that_draws_draws_anew(options: dict[str, Any]) -> None:
    """An evaluation draws anew each time, as in eager; training has the masks of a run without
    evaluations."""
    torch.manual_seed(11)
    want = losses(trainer_of("rand", **options), 3)
    found = []
    for _ in range(2):
        torch.manual_seed(11)
        trainer, trained, evaluated = trainer_of("rand", **options), [], []
        for i in range(3):
            evaluated += [float(trainer.eval_step(X, Y).loss) for _ in range(i + 1)]
            trained += losses(trainer, 1)
        assert trained == want
        assert len({*evaluated, *trained}) == 9
        found.append(evaluated)
    assert found[0] == found[1]
    first = trainer.eval_step(X, Y).loss
    saved = trainer.state_dict()
    second = trainer.eval_step(X, Y).loss
    torch.manual_seed(99)
    other = trainer_of("rand", **options)
    other.load_state_dict(saved)
    assert torch.equal(other.eval_step(X, Y).loss, second)
    assert not torch.equal(first, second)
