"""Training steps on a CUDA device: eager's numbers, one wait per step, nothing half done."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from device_waits import waits_refused
from loops import OPTIMIZERS, assert_unchanged, frozen_copy
from tiny_families import CASES, allowed

import onward
from onward.execute.runtime import CudaRuntime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Products of fp32 are of fp32: TF32 would be 1000 times as far from the truth."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def moved(model: torch.nn.Module, device: str = "cuda") -> torch.nn.Module:
    return model.to(device)


def on_gpu(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.cuda() for name, x in data.items()}


def loss_of(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    found: Any = model(**data)
    return found if isinstance(found, torch.Tensor) else found["loss"]


def eager_steps(
    model: torch.nn.Module, data: dict[str, torch.Tensor], dtype: torch.dtype, steps: int
) -> dict[str, torch.Tensor]:
    """Losses, and the weights after so many steps of SGD."""
    twin = copy.deepcopy(model).to(dtype)
    cast = {n: x.to(dtype) if x.is_floating_point() else x for n, x in data.items()}
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    found: dict[str, torch.Tensor] = {}
    for i in range(steps):
        optimizer.zero_grad()
        loss = loss_of(twin, cast)
        loss.backward()
        optimizer.step()
        found[f"loss {i}"] = loss.detach()
    return {**found, **{n: p.detach() for n, p in twin.named_parameters()}}


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_eager(name: str) -> None:
    model, data = moved(CASES[name][0]()), on_gpu(CASES[name][1]())
    exact, plain = (eager_steps(model, data, t, 3) for t in (torch.float64, torch.float32))
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05))
    ours = {f"loss {i}": trainer.train_step(data).loss for i in range(3)}
    ours |= {n: p.detach() for n, p in model.named_parameters()}
    assert set(ours) == set(exact)
    for key, truth in exact.items():
        assert ours[key].is_cuda
        distance = float((ours[key].double() - truth).norm())
        assert distance <= 2 * allowed(plain[key], truth, exact), key


# The gradient of a key's bias is nothing but noise, which Adam would make as large as any other.
MAKERS = {**OPTIMIZERS, "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-3)}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("window", [1, 2])
def test_every_optimizer_and_window(name: str, window: int) -> None:
    model, data = moved(tiny.gpt2(0.0)), on_gpu(tiny.batch(4, 12, "right"))
    twin = copy.deepcopy(model)
    options = onward.TrainerOptions(
        seed=1,
        gradient_accumulation_steps=window,
        gradient_accumulation_average="micro_batches",
    )
    trainer = onward.Trainer(model, MAKERS[name](model.parameters()), options=options)
    theirs = MAKERS[name](twin.parameters())
    for _ in range(3):
        theirs.zero_grad()
        for half in tiny.halves(data) if window == 2 else [data]:
            trainer.train_step(half)
            (loss_of(twin, half) / window).backward()
        theirs.step()
    for key, p in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(key), p, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("way", ["trainer", "accelerate"])
def test_a_model_on_another_device_than_the_current_one(way: str) -> None:
    """Launched one by one and as recordings, on batches that differ."""
    model = moved(tiny.gpt2(0.0), "cuda:1")
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin))
    trainer = onward.Trainer(model, ours) if way == "trainer" else onward.accelerate(model)
    for seed in range(5):
        torch.manual_seed(seed)
        data = {n: x.to("cuda:1") for n, x in tiny.batch(4, 12).items()}
        theirs.zero_grad()
        want = loss_of(twin, data)
        want.backward()
        theirs.step()
        if isinstance(trainer, onward.Trainer):
            loss = trainer.train_step(data).loss
        else:
            ours.zero_grad()
            loss = trainer(**data)["loss"]
            loss.backward()
            ours.step()
        torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-4, atol=1e-6)
    assert torch.cuda.current_device() == 0
    for key, p in twin.named_parameters():
        torch.testing.assert_close(model.get_parameter(key), p, rtol=1e-3, atol=1e-5, msg=key)


def test_dropout_is_the_same_as_on_the_cpu() -> None:
    """The generator counts; losses of a seed agree across devices to rounding."""
    losses = []
    for device in ("cpu", "cuda"):
        model = moved(tiny.gpt2(0.3), device)
        data = {n: x.to(device) for n, x in tiny.batch(4, 12).items()}
        trainer = onward.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.05), options={"seed": 3}
        )
        losses.append([float(trainer.train_step(data).loss) for _ in range(4)])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=0)


def test_batches_of_other_sizes() -> None:
    model = moved(tiny.bert(0.0))
    twin = copy.deepcopy(model)
    trainer = onward.Trainer(model, OPTIMIZERS["sgd"](model.parameters()))
    theirs = OPTIMIZERS["sgd"](twin.parameters())
    for size, length in ((4, 12), (2, 20), (5, 7), (1, 12), (4, 12)):
        data = on_gpu(tiny.batch(size, length, "right", ignored=True))
        theirs.zero_grad()
        loss = loss_of(twin, data)
        loss.backward()
        theirs.step()
        got = trainer.train_step(data).loss
        torch.testing.assert_close(got, loss.detach(), rtol=1e-4, atol=1e-6)


def test_a_batch_on_the_host_waits_for_nothing() -> None:
    """A batch is copied behind what is queued, and may change once the call has returned."""
    place = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    runtime, content = CudaRuntime(place.device), torch.arange(1 << 20, dtype=torch.int32)
    torch.cuda.synchronize()
    with waits_refused():
        for _ in range(20):
            busy = busy @ busy * 0.01
        runtime.put(content, place)
        content.zero_()
    assert torch.equal(place.cpu(), torch.arange(1 << 20))


def test_a_label_out_of_range_is_refused_and_nothing_changes() -> None:
    model, data = moved(tiny.gpt2(0.0)), on_gpu(tiny.batch(4, 12))
    trainer = onward.Trainer(model, OPTIMIZERS["adamw"](model.parameters()))
    trainer.train_step(data)
    before = frozen_copy(trainer)
    bad = {n: x.clone() for n, x in data.items()}
    bad["labels"][1, 5] = tiny.VOCABULARY
    with pytest.raises((IndexError, onward.OnwardError)):
        trainer.train_step(bad)
    assert_unchanged(before, frozen_copy(trainer))
    trainer.train_step(data)


def test_weights_stay_where_nothing_is_finite() -> None:
    model, data = moved(tiny.gpt2(0.0)), on_gpu(tiny.batch(4, 12))
    with torch.no_grad():
        model.get_parameter("transformer.wte.weight")[3, 3] = torch.inf
    trainer = onward.Trainer(model, OPTIMIZERS["adamw"](model.parameters()))
    before = frozen_copy(trainer)["model"]
    assert trainer.train_step(data).skipped
    assert_unchanged(before, frozen_copy(trainer)["model"])


def test_the_plan_tells_the_memory() -> None:
    """What the allocator has at the peak of a step is what the plan says, to 2 % and 2 MiB."""
    model = moved(tiny.gpt2(0.1, layers=4, width=256, n_head=4))
    data = on_gpu(tiny.batch(16, 64))
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        trainer.train_step(data)
    held = torch.cuda.memory_allocated() - trainer.plan.arena_bytes
    torch.cuda.reset_peak_memory_stats()
    trainer.train_step(data)
    peak = torch.cuda.max_memory_allocated() - held
    predicted = trainer.plan.arena_bytes
    assert peak <= predicted * 1.02 + 2 * 2**20
