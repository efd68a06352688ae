"""A step is done or it is not: exceptions, signals, memory that runs out, numbers that are not
finite, modes of autograd, threads."""

from __future__ import annotations

import _thread
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from loops import OPTIMIZERS, Pair, assert_unchanged, frozen_copy
from tiny import batch, bert, gpt2
from torch import nn

import onward
from onward import OnwardError
from onward.execute import Executable

pytestmark = pytest.mark.usefixtures("captures_kept")


class Net(nn.Module):
    """Two lookups that may refuse an id, dropout, and a scale that may make gradients infinite."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(7, 6), nn.Embedding(5, 6)
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 7)
        self.drop = nn.Dropout(dropout)

    def forward(
        self, ids: torch.Tensor, kinds: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        h = self.drop(torch.tanh(self.inner(self.first(ids) * scale)))
        logits = self.outer(h + self.second(kinds))
        aside = self.second(kinds).pow(2).mean()  # a branch of its own
        return nn.functional.cross_entropy(logits, labels) + aside


def data(scale: float = 1.0, **changed: int) -> dict[str, Any]:
    made = {"ids": torch.arange(6), "kinds": torch.arange(6) % 5, "labels": torch.arange(6)}
    for name, number in changed.items():
        made[name] = made[name].clone()
        made[name][3] = number
    return made | {"scale": torch.tensor(scale)}


def trained(n: int = 1, optimizer: str = "adamw", **options: Any) -> onward.Trainer:
    torch.manual_seed(3)
    model = Net()
    made = onward.TrainerOptions(gradient_accumulation_steps=n, **options)
    trainer = onward.Trainer(model, OPTIMIZERS[optimizer](model.parameters()), options=made)
    for _ in range(n + 1):  # past an update, and with n > 1 within a window
        trainer.train_step(**data())
    return trainer


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.1},
    "accumulated": {"n": 3},
    "updates at once": {"skip_nonfinite": False},
}

# ---- exceptions


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [{"ids": 7}, {"kinds": 5}, {"ids": -1}, {"labels": 7}], ids=str)
def test_a_batch_that_is_refused_changes_nothing(mode: str, bad: dict[str, int]) -> None:
    trainer = trained(**MODES[mode])
    before = frozen_copy(trainer)
    with pytest.raises((IndexError, OnwardError)):
        trainer.train_step(**data(**bad))
    assert_unchanged(before, frozen_copy(trainer))
    other = trained(**MODES[mode])
    other.load_state_dict(trainer.state_dict())
    torch.set_rng_state(before["rng"])
    want = other.train_step(**data()).loss
    torch.set_rng_state(before["rng"])
    assert torch.equal(trainer.train_step(**data()).loss, want)


class Stop(BaseException):
    """Not an Exception, as KeyboardInterrupt."""


@contextmanager
def launch_acts(at: int, act: Callable[[], None]) -> Iterator[None]:
    """Within it, the launch number `at` of a plan that writes acts before it runs, once."""
    run = Executable.run

    def patched(self: Executable, inputs: Any, dims: Any = None, *more: Any) -> bool:
        if self.plan.commit < len(self.plan.launches):
            self.bind(dims)
            launch = self.launches[at]

            def first() -> None:
                self.launches[at] = launch
                act()
                launch()

            self.launches[at] = first
        return run(self, inputs, dims, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executable, "run", patched)
        yield


def points(trainer: onward.Trainer) -> list[int]:
    """Launches of the last plan: the first, those about the first write, and the last."""
    commit, count = trainer._last_run().plan.commit, len(trainer._last_run().plan.launches)
    assert 1 < commit < count
    return sorted({0, commit - 1, commit, min(commit + 1, count - 1), count - 1})


def _raise() -> None:
    raise Stop


@pytest.mark.parametrize("mode", MODES)
def test_a_launch_that_fails_leaves_the_state_or_says_so(mode: str) -> None:
    """At every launch: before the first write nothing has changed; later the trainer refuses to go
    on until a state is loaded."""
    trainer = trained(**MODES[mode])
    trainer.train_step(**data())
    saved, rng = trainer.state_dict(), torch.get_rng_state()
    trainer.train_step(**data())
    told = 0
    for at in points(trainer):
        commit = trainer._last_run().plan.commit
        trainer.load_state_dict(saved)
        torch.set_rng_state(rng)
        before = frozen_copy(trainer)
        with launch_acts(at, _raise), pytest.raises(Stop):
            trainer.train_step(**data())
        if at < commit:
            assert_unchanged(before, frozen_copy(trainer))
            continue
        told += 1
        with pytest.raises(OnwardError, match=r"interrupted an update.*load_state_dict"):
            trainer.train_step(**data())
    assert told
    trainer.load_state_dict(saved)
    trainer.train_step(**data())


# ---- signals


@pytest.fixture
def alarm() -> Iterator[None]:
    """Handlers that raise: one of the user's own, and Python's for SIGINT, which is ignored in what
    a shell starts in the background."""

    def handler(number: int, frame: Any) -> None:
        raise Stop

    raising = {signal.SIGALRM: handler, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, raises) for number, raises in raising.items()}
    yield
    for number, held in before.items():
        signal.signal(number, held)


INTERRUPTS: dict[str, Callable[[], None]] = {
    "SIGINT": lambda: signal.raise_signal(signal.SIGINT),
    "SIGALRM": lambda: signal.raise_signal(signal.SIGALRM),
    "interrupt_main": _thread.interrupt_main,
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [*(("SIGINT", mode) for mode in MODES), ("SIGALRM", "plain"), ("interrupt_main", "plain")],
)
def test_an_interrupted_step_is_whole(kind: str, mode: str, alarm: None) -> None:
    """Whatever the launch at which a signal arrives: none of the step is done, or all of it."""
    del alarm
    trainer = trained(**MODES[mode])
    start = trainer.state_dict()
    rng = torch.get_rng_state()
    trainer.train_step(**data())
    want = frozen_copy(trainer)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGALRM)}
    done = undone = 0
    for at in points(trainer):
        trainer.load_state_dict(start)
        torch.set_rng_state(rng)
        before = frozen_copy(trainer)
        with launch_acts(at, INTERRUPTS[kind]), pytest.raises((KeyboardInterrupt, Stop)):
            trainer.train_step(**data())
        after = frozen_copy(trainer)
        whole = after["updates"] > before["updates"] or after["window"] != before["window"]
        done, undone = done + whole, undone + (not whole)
        assert_unchanged(want if whole else before, after)
    assert done and undone
    assert handlers == {n: signal.getsignal(n) for n in handlers}


def test_an_exception_sent_from_another_thread_is_noticed() -> None:
    trainer = trained()

    def send() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Stop)
        )

    at = len(trainer._last_run().plan.launches) - 2
    with launch_acts(at, send), pytest.raises(Stop):
        trainer.train_step(**data())
    with pytest.raises(OnwardError, match=r"interrupted an update"):
        trainer.train_step(**data())


# ---- memory that runs out


def test_after_memory_ran_out_a_smaller_batch_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2(0.0)
    trainer = onward.Trainer(model, onward.optim.AdamW())
    small, large = batch(2, 6), batch(8, 32)
    trainer.train_step(small)
    before = frozen_copy(trainer)
    empty = torch.empty

    def limited(*size: Any, **how: Any) -> torch.Tensor:
        if size and isinstance(size[0], int) and size[0] > 200_000:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", limited)
    for _ in range(2):
        with pytest.raises(OnwardError, match=r"(?s)MiB beyond the weights.*\nfix: "):
            trainer.train_step(large)
        assert_unchanged(before, frozen_copy(trainer))
    trainer.train_step(small)
    monkeypatch.undo()
    trainer.train_step(large)
    trainer.train_step(small)
    assert trainer.updates == 4


# ---- numbers that are not finite


@pytest.mark.parametrize("mode", ["plain", "clipped", "accumulated"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_an_update_of_gradients_that_are_not_finite_is_left_out(
    scale: float, optimizer: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trained(optimizer=optimizer, **MODES[mode])
    while trainer.micro_steps:
        trainer.train_step(**data())
    before = frozen_copy(trainer)
    n = trainer.options.gradient_accumulation_steps
    steps = [trainer.train_step(**data(scale if i == 0 else 1.0)) for i in range(n)]
    assert [s.skipped for s in steps] == [False] * (n - 1) + [True]
    assert not any(s.updated for s in steps)
    assert "not finite" in caplog.text
    after = frozen_copy(trainer)
    state = ("model", "updates", "counts", "window")
    assert_unchanged({k: before[k] for k in state}, {k: after[k] for k in state})
    kept = {k: v for k, v in before["optimizer"].items() if not k.startswith("accumulator.")}
    assert_unchanged(kept, {k: after["optimizer"][k] for k in kept})
    for _ in range(n):
        last = trainer.train_step(**data())
    assert last.updated and not last.skipped and bool(torch.isfinite(last.loss))


def test_gradients_so_large_that_their_norm_is_infinite_are_clipped_as_in_eager() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.w * x).sum()

    model = Large()
    options = onward.TrainerOptions(max_grad_norm=1.0)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1), options=options)
    x = torch.full((4,), 3e38)
    step = trainer.train_step(x)
    model.w.grad = None
    twin = nn.Parameter(torch.ones(4))
    (twin * x).sum().backward()
    torch.nn.utils.clip_grad_norm_([twin], 1.0)
    torch.optim.SGD([twin], lr=0.1).step()
    assert step.updated and not step.skipped
    torch.testing.assert_close(model.w, twin)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_the_check_updates_are_eagers(optimizer: str) -> None:
    pair = Pair(Net(0.0), OPTIMIZERS[optimizer], skip_nonfinite=False)
    pair.step(**data())
    pair.eager_step(**data(float("nan")))
    step = pair.trainer.train_step(**data(float("nan")))
    assert step.updated and not step.skipped
    theirs = dict(pair.twin.named_parameters())
    for name, p in pair.model.named_parameters():
        assert torch.equal(p.isnan(), theirs[name].isnan()), name


# ---- modes of autograd


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_around_a_step(mode: Callable[[], Any]) -> None:
    pair = Pair(Net(0.0))
    with torch.no_grad():
        want = pair.eager_loss(**data())
    with mode():
        torch.testing.assert_close(pair.trainer.eval_step(**data()).loss, want)
    pair.step(**data())
    with mode():
        got = pair.trainer.train_step(**data())
        state = pair.trainer.state_dict()
    assert not got.loss.is_inference()
    torch.testing.assert_close(got.loss, pair.eager_step(**data()))
    pair.trainer.load_state_dict(state)
    pair.step(**data())


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = Net()
    trainer = onward.Trainer(model, onward.optim.AdamW())
    with pytest.raises(OnwardError, match="inference_mode"):
        trainer.train_step(**data())


# ---- threads


def test_one_trainer_in_several_threads_steps_one_after_the_other() -> None:
    """Losses and weights are those of the same batches in some order: here all are alike."""
    trainer, alone = trained(seed=5), trained(seed=5)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: trainer.train_step(**data()).loss, range(24)))
    want = [alone.train_step(**data()).loss for _ in range(24)]
    assert sorted(map(float, found)) == sorted(map(float, want))
    assert_unchanged(frozen_copy(alone)["model"], frozen_copy(trainer)["model"])


def test_trainers_may_be_captured_and_run_at_the_same_time() -> None:
    """Captures patch what all threads share; eager code in other threads sees nothing of it."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * 2

    makers: list[Callable[[], nn.Module]] = [lambda: gpt2(0.0), lambda: bert(0.0)]
    wants = [make()(**batch(4, 12)).loss.item() for make in makers]
    stop, failed = threading.Event(), []

    def eager() -> None:
        x = torch.ones(3, requires_grad=True)
        layer = nn.TransformerEncoderLayer(4, 2, batch_first=True)
        mask = nn.Transformer.generate_square_subsequent_mask(3)
        want = layer.eval()(torch.ones(1, 3, 4), mask)
        while not stop.is_set():
            try:
                Double.apply(x).sum().backward()
                assert torch.equal(layer(torch.ones(1, 3, 4), mask), want)
            except BaseException as error:
                failed.append(error)
                return

    models = [make() for make in makers]  # here: threads would share torch's one generator

    def train(i: int) -> float:
        trainer = onward.Trainer(models[i], onward.optim.AdamW())
        return trainer.train_step(batch(4, 12)).loss.item()

    aside = threading.Thread(target=eager)
    aside.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            losses = list(pool.map(train, range(2)))
    finally:
        stop.set()
        aside.join()
    assert not failed
    assert losses == pytest.approx(wants, rel=1e-5)
