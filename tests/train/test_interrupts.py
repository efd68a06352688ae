"""Exceptions at any moment: afterwards the state is that before the call or that after it, to the
bit, or the next step says that an update was interrupted; and the next step is the right one."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from moments import STRIKES, chosen, events, pythons_handler, struck
from torch import nn
from torch.nn import functional as F

import onward
from onward import OnwardError

# a finalizer that an exception reaches cannot pass it on
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("captures_kept", "handled"),
]
X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5


@pytest.fixture
def handled() -> Iterator[None]:
    with pythons_handler():
        yield


class Net(nn.Module):
    """Dropout, and a buffer that a forward in training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 5)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.outer(self.drop(torch.tanh(self.norm(self.inner(x))))), labels)


class OwnSGD(torch.optim.SGD):
    """An optimizer whose updates no graph makes, since its class is not torch's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def made(kind: str = "adamw", **options: Any) -> onward.Trainer:
    torch.manual_seed(3)
    model = Net()
    optimizers: dict[str, Callable[[], Any]] = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.1),
        "own": lambda: OwnSGD(model.parameters(), lr=0.1, momentum=0.9),
    }
    return onward.Trainer(model, optimizers[kind](), options={"seed": 5, **options})


def step(trainer: onward.Trainer) -> Callable[[], object]:
    return lambda: trainer.train_step(X, Y)


def evaluation(trainer: onward.Trainer) -> Callable[[], object]:
    return lambda: trainer.eval_step(X, Y)


def reloading(trainer: onward.Trainer) -> Callable[[], object]:
    """Restores a state of two steps before."""
    state = trainer.state_dict()
    for _ in range(2):
        trainer.train_step(X, Y)
    return lambda: trainer.load_state_dict(state)


def copied(trainer: onward.Trainer) -> dict[str, Any]:
    """Copies of all that a step may change."""
    return {**trainer.state_dict(), "rng": torch.get_rng_state()}


def which(trainer: onward.Trainer, **states: dict[str, Any]) -> str:
    """The name of the state that the trainer is in; "torn" for none of them."""
    try:
        now = copied(trainer)
    except OnwardError:
        return "torn"
    return next((name for name, state in states.items() if same(now, state)), "torn")


def smaller(trainer: onward.Trainer) -> Callable[[], object]:
    """A step for which launches are bound anew, and again for the step behind it."""
    return lambda: trainer.train_step(X[:6], Y[:6])


WINDOW = {"gradient_accumulation_steps": 2}
CALLS: dict[str, tuple[Callable[[onward.Trainer], Callable[[], object]], dict[str, Any], int]] = {
    "a step": (step, {}, 100),
    "a step of another size": (smaller, {}, 60),
    "a clipped step": (step, {"max_grad_norm": 0.1}, 20),
    "a micro-step": (step, WINDOW, 30),
    "updates at once": (step, {"skip_nonfinite": False}, 30),
    "judged losses": (step, {"loss_spikes": "skip"}, 30),
    "averaged weights": (step, {"ema_decay": 0.9}, 30),
    "its own optimizer": (step, {"kind": "own"}, 50),
    "the end of a window": (lambda t: t.update, WINDOW, 40),
    "an evaluation": (evaluation, {}, 30),
    "a load": (reloading, {}, 60),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def whole(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--whole"))


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_whole_wherever_it_is_interrupted(
    call: str, strike: str, request: pytest.FixtureRequest
) -> None:
    """SIGINT never leaves a torn state; an exception that was sent may, and then it is said."""
    get, options, count = CALLS[call]
    trainer = made(**options)
    for _ in range(3 if WINDOW.items() <= options.items() else 2):
        trainer.train_step(X, Y)
    trainer.eval_step(X, Y)
    act = get(trainer)
    if call == "the end of a window":
        act()  # its graph is made with the first
        trainer.train_step(X, Y)
    start, rng = trainer.state_dict(), torch.get_rng_state()

    def begin() -> None:
        trainer.load_state_dict(start)
        torch.set_rng_state(rng)

    begin()
    act()
    after = copied(trainer)
    trainer.train_step(X, Y)
    nexts = {"after": copied(trainer)}
    begin()
    before = copied(trainer)
    trainer.train_step(X, Y)
    nexts["before"] = copied(trainer)
    begin()
    moments = chosen(events(act), count * 5 if whole(request) else count)
    assert len(moments) >= 20
    found = {"before": 0, "after": 0, "torn": 0}
    for moment in moments:
        begin()
        if not struck(act, moment, STRIKES[strike]):
            continue
        assert torch.is_grad_enabled() and trainer.model.training, moment
        is_now = which(trainer, before=before, after=after)
        found[is_now] += 1
        if is_now == "torn":
            assert strike == "sent", (moment, found)
            with pytest.raises(OnwardError, match=r"interrupted an update.*load_state_dict"):
                trainer.train_step(X, Y)
            continue
        try:
            trainer.train_step(X, Y)
        except OnwardError as error:  # a sent exception may come when all is written
            assert strike == "sent" and "interrupted an update" in str(error), (moment, found)
            continue
        assert same(nexts[is_now], copied(trainer)), (moment, is_now)
    assert found["before"]


def test_an_accelerated_call_is_whole_wherever_it_is_interrupted(
    request: pytest.FixtureRequest,
) -> None:
    """What a user's loop does afterwards: clear the gradients and compute the batch again."""
    torch.manual_seed(3)
    model = Net()
    model.drop.p = 0.0
    onward.accelerate(model)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    got: list[torch.Tensor] = []

    def begin() -> None:
        model.zero_grad()
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

    def act() -> None:
        loss = model(X, Y)
        loss.backward()
        got[:] = [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]

    for _ in range(2):
        begin()
        act()
    want = list(got)
    assert len(want) == 7
    begin()
    moments = chosen(events(act), 500 if whole(request) else 100)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    for moment in moments:
        for strike in STRIKES.values():
            begin()
            struck(act, moment, strike)
            assert same(weights, dict(model.named_parameters())), moment
            assert torch.is_grad_enabled() and model.training, moment
            begin()
            act()
            assert all(map(torch.equal, got, want)), moment


def test_a_save_that_is_interrupted_costs_nothing(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The state is as before, the checkpoint whole or not there, and the next save works."""
    trainer = made()
    trainer.train_step(X, Y)
    trainer.save(tmp_path / "first")
    before = copied(trainer)
    number = iter(range(10_000))
    moments = chosen(
        events(lambda: trainer.save(tmp_path / "counted")), 200 if whole(request) else 40
    )
    for moment in moments:
        folder = tmp_path / str(next(number))
        struck(lambda folder=folder: trainer.save(folder), moment, STRIKES["SIGINT"])
        assert same(before, copied(trainer)), moment
        if any(folder.glob("checkpoint-*")):
            trainer.resume(folder, strict=True)
            assert same(before, copied(trainer)), moment
        trainer.save(folder)
        trainer.resume(folder, strict=True)
    assert same(before, copied(trainer))


class Wide(nn.Module):
    """Linear layers; one seed makes the same again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), labels)


@pytest.mark.parametrize("way", ["Trainer", "accelerate"])
def test_a_first_step_that_is_interrupted_can_be_tried_again(
    way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Random moments of capture, compilation and the first run, by an alarm's clock."""
    monkeypatch.undo()  # captures are made each time

    def first() -> Callable[[], float]:
        model = Wide()
        if way == "Trainer":
            trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
            return lambda: float(trainer.train_step(X, Y).loss)
        onward.accelerate(model)

        def call() -> float:
            loss = model(X, Y)
            loss.backward()
            return loss.item()

        return call

    want = first()()
    began = time.monotonic()
    first()()
    took = time.monotonic() - began
    draw = random.Random(7)

    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    held = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(100 if whole(request) else 6):
            call = first()
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-4, draw.uniform(0.0, 1.1 * took)))
                call()
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            except KeyboardInterrupt:
                assert call() == want, "the step after the interrupted one"
            assert torch.is_grad_enabled()
            x = torch.ones(2, 6, requires_grad=True)  # eager code is as before
            nn.Linear(6, 2)(x).sum().backward()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, held)
