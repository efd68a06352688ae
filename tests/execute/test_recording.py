"""Steps that a device records: replays compute what launches would; nothing stale is replayed."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from device_double import DoubleRuntime, planned_for_cuda
from loops import OPTIMIZERS
from torch import nn

import onward
from onward.execute.binder import Binder
from onward.execute.memory import Memory
from onward.execute.runtime import CudaRuntime

STEPS = 4


def trained(
    double: DoubleRuntime | None,
    model: nn.Module,
    batches: list[dict[str, torch.Tensor]],
    options: dict[str, Any] | None = None,
    optimizer: str = "adamw",
) -> tuple[list[torch.Tensor], onward.Trainer]:
    """Trains a copy of the model by the plans of a CUDA device; its losses and weights."""
    model = copy.deepcopy(model)
    with planned_for_cuda(double):
        made = OPTIMIZERS[optimizer](model.parameters())
        trainer = onward.Trainer(model, made, options={"seed": 1, **(options or {})})
        losses = [trainer.train_step(data).loss.clone() for data in batches]
    return [*losses, *[p.detach().clone() for p in model.parameters()]], trainer


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def sized(count: int, padding: str = "right") -> list[dict[str, torch.Tensor]]:
    """Batches of three sizes in turn, no two alike."""
    sizes = [(4, 12), (2, 20), (4, 12), (3, 8)]
    made: list[dict[str, torch.Tensor]] = []
    for i in range(count):
        torch.manual_seed(i)
        made.append(tiny.batch(*sizes[i % len(sizes)], padding, ignored=True))
    return made


MODELS = {"gpt2": tiny.gpt2, "bert": tiny.bert}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("disable", [(), ("row_demand",)], ids=["packed", "padded"])
def test_replays_compute_what_launches_compute(name: str, disable: tuple[str, ...]) -> None:
    """Batches of three sizes in turn, with dropout, padding and labels left out: each size is
    recorded once and replayed then, with each batch's own content."""
    model, batches, options = MODELS[name](0.3), sized(12), {"disable": disable}
    expected, _ = trained(None, model, batches, options)
    double = DoubleRuntime()
    found, _ = trained(double, model, batches, options)
    assert_same(found, expected)
    assert double.recordings and double.replays > double.recordings


class Loudest(nn.Module):
    """A part that no graph can hold: it reads its data on the host."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(np.abs(x.detach().numpy()).max())


class Steered(nn.Module):
    """Layers around a part that runs in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)
        )
        self.part, self.last = Loudest(), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(self.first(x.tanh()).sin()).tanh()).square().mean()


@pytest.mark.filterwarnings("ignore::onward.errors.EagerWarning")
def test_the_host_works_between_recordings() -> None:
    """A part of the model that runs in PyTorch is never recorded; what is around it is."""
    torch.manual_seed(0)
    model, batches = Steered(), [{"x": torch.randn(4, 8)} for _ in range(5)]
    expected, _ = trained(None, model, batches, optimizer="sgd")
    double = DoubleRuntime()
    found, trainer = trained(double, model, batches, optimizer="sgd")
    assert any(x.op == "Region" for x in trainer.plan.launches)
    assert_same(found, expected)
    assert double.recordings >= 2


def test_a_batch_of_known_sizes_binds_nothing() -> None:
    double, batches = DoubleRuntime(), sized(4)
    with planned_for_cuda(double):
        model = tiny.bert(0.3)
        trainer = onward.Trainer(model, OPTIMIZERS["adamw"](model.parameters()))
        for data in [*batches, *batches]:  # the arenas grow in the first round
            trainer.train_step(data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Binder, "_fill", lambda *_: pytest.fail("launches are bound again"))
            patch.setattr(Memory, "_block", lambda *_: pytest.fail("an arena is allocated"))
            for data in batches:
                trainer.train_step(data)


def test_nothing_stale_is_replayed_when_memory_moves() -> None:
    """A larger batch moves the arenas, and a parameter gets another tensor: what was recorded
    before holds addresses of memory that is gone."""
    model, batches = tiny.gpt2(0.3), [*sized(6), tiny.batch(16, 30, "right"), *sized(6)]

    def moving(double: DoubleRuntime | None) -> list[torch.Tensor]:
        twin = copy.deepcopy(model)
        losses: list[torch.Tensor] = []
        with planned_for_cuda(double):
            trainer = onward.Trainer(
                twin, OPTIMIZERS["sgd"](twin.parameters()), options={"seed": 1}
            )
            for number, data in enumerate(batches):
                if number == 9:
                    for p in twin.parameters():
                        p.data = p.data.clone()
                losses.append(trainer.train_step(data).loss.clone())
        return [*losses, *[p.detach().clone() for p in twin.parameters()]]

    double = DoubleRuntime()
    assert_same(moving(double), moving(None))
    assert double.replays > double.recordings


SETTINGS = {
    "the precision of products": (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "sums of products in bf16": (
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False,
    ),
    "sums of products in fp16": (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
    "deterministic convolutions": (torch.backends.cudnn, "deterministic", True),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_pytorch_that_changes_is_recorded_anew(name: str) -> None:
    """A recording computes as PyTorch was set when it was made."""
    (part, setting, value), data = SETTINGS[name], tiny.batch(4, 12)
    double = DoubleRuntime()
    with planned_for_cuda(double):
        model = tiny.gpt2(0.3)
        trainer = onward.Trainer(model, OPTIMIZERS["sgd"](model.parameters()))

        def recordings() -> int:
            for _ in range(3):
                trainer.train_step(data)
            return double.recordings

        once = recordings()
        assert once and recordings() == once
        before = getattr(part, setting)
        assert before != value
        # torch's own test modules, once imported, freeze these flags for a process
        with getattr(torch.backends, "__allow_nonbracketed_mutation")():
            try:
                setattr(part, setting, value)
                assert recordings() == 2 * once
            finally:
                setattr(part, setting, before)
            assert recordings() == 3 * once


def test_launches_run_one_by_one_where_they_cannot_be_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batches = tiny.gpt2(0.3), [tiny.batch(4, 12)] * STEPS
    double = DoubleRuntime()
    double.fails = True
    expected, _ = trained(None, model, batches)
    with caplog.at_level(logging.WARNING, logger="onward"):
        found, _ = trained(double, model, batches)
    assert_same(found, expected)
    said = [r.getMessage() for r in caplog.records if r.name == "onward"]
    assert len(said) == len(set(said)) == 1
    assert "operation not permitted when stream is capturing" in said[0]


def test_an_interrupted_step_is_replayed_whole() -> None:
    """An interrupt while a step is recorded or replayed leaves nothing half done."""
    model, batches = tiny.gpt2(0.3), [tiny.batch(4, 12)] * 3
    expected, _ = trained(None, model, [*batches, batches[0]])

    class Interrupted(DoubleRuntime):
        def recorded(self, launches: Any) -> Any:
            replay = super().recorded(launches)
            self.recorded_once = True

            def run() -> None:
                replay()
                if self.recorded_once:
                    self.recorded_once = False
                    raise KeyboardInterrupt

            return run

    double = Interrupted()
    twin = copy.deepcopy(model)
    with planned_for_cuda(double):
        trainer = onward.Trainer(twin, OPTIMIZERS["adamw"](twin.parameters()), options={"seed": 1})
        losses = []
        while len(losses) < 4:
            try:
                losses.append(trainer.train_step(batches[0]).loss.clone())
            except KeyboardInterrupt:
                continue
    assert_same([*losses, *[p.detach() for p in twin.parameters()]], expected)


@contextmanager
def stepping(double: DoubleRuntime) -> Iterator[Callable[[], Any]]:
    """Steps of one Trainer on one batch, by the plans of a CUDA device."""
    model, data = tiny.gpt2(0.0), tiny.batch(4, 12)
    with planned_for_cuda(double):
        trainer = onward.Trainer(model, OPTIMIZERS["sgd"](model.parameters()))
        yield lambda: trainer.train_step(data)


def test_a_run_that_was_interrupted_is_no_run_before_a_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels behind the interrupt have not been compiled, which ends a recording."""
    bound, left = Binder._bound, [KeyboardInterrupt]

    def breaking(self: Binder, i: int, made: Any) -> Callable[[], None]:
        launch = bound(self, i, made)

        def run() -> None:
            if left:
                raise left.pop()
            launch()

        return run if i == 3 else launch

    double = DoubleRuntime()
    with stepping(double) as step:
        monkeypatch.setattr(Binder, "_bound", breaking)
        with pytest.raises(KeyboardInterrupt):
            step()
        step()
        assert not double.recordings
        step()
        assert double.recordings


def test_a_thread_records_what_it_has_run() -> None:
    """CUDA's libraries have a handle for each thread, which its first run makes."""
    double = DoubleRuntime()
    with stepping(double) as step:
        step()
        other = threading.Thread(target=step)
        other.start()
        other.join()
        assert not double.recordings
        step()
        assert double.recordings


def test_a_recording_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """A thread that waits for the device ends the recording of another; the next one is made."""
    double = DoubleRuntime()
    with stepping(double) as step, caplog.at_level(logging.WARNING, logger="onward"):
        step()
        double.fails = True
        step()
        double.fails = False
        step()
        assert double.recordings
    assert not [r for r in caplog.records if r.name == "onward"]


def test_an_accelerated_loop_is_recorded_in_halves() -> None:
    """A loop of the user's: its forward and its backward are recorded each."""
    batches = sized(9)

    def looped(double: DoubleRuntime | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = tiny.gpt2(0.0)
        with planned_for_cuda(double):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            # on a CPU this op's kernel reads a number on the host
            fast = onward.accelerate(model, disable=("linear_cross_entropy",))
            losses = []
            for data in batches:
                optimizer.zero_grad()
                loss = fast(**data)["loss"]
                loss.backward()
                optimizer.step()
                losses.append(loss.detach().clone())
        return [*losses, *[p.detach().clone() for p in model.parameters()]]

    double = DoubleRuntime()
    assert_same(looped(double), looped(None))
    assert double.recordings >= 2


def test_a_batch_goes_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place's dtype, as CUDA copies without a wait; what the host reads stays there."""
    made: list[torch.Tensor] = []

    def pinned(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty(shape, dtype=dtype))
        return made[-1]

    monkeypatch.setattr("onward.execute.runtime._pinned", pinned)
    runtime, content = CudaRuntime(torch.device("cuda")), torch.arange(6, dtype=torch.int32)
    runtime.put(content, torch.empty(6, dtype=torch.int64, device="meta"))
    assert torch.equal(made[0], torch.arange(6))
    host = torch.zeros(6)
    runtime.put(content, host)
    assert len(made) == 1 and torch.equal(host, torch.arange(6.0))
