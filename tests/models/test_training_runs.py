"""Many steps beside eager PyTorch, dropout off: optimizers, clipping, schedules, accumulation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Tensors, batch, bert, gpt2, halves
from torch import nn
from transformers import get_linear_schedule_with_warmup

import onward

pytestmark = pytest.mark.usefixtures("captures_kept")

Make = Callable[[Any], torch.optim.Optimizer]


def groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay; biases and norms do not, and have their own learning
    rate."""
    flat = [p for p in model.parameters() if p.dim() == 1]
    deep = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": deep, "weight_decay": decay},
        {"params": flat, "weight_decay": 0.0, "lr": 2e-3},
    ]


def eager_run(
    model: nn.Module, make: Make, data: list[Tensors], dtype: torch.dtype, clip: float | None = None
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses, final parameters and gradient norms of PyTorch's own loop on a copy."""
    twin = copy.deepcopy(model).to(dtype)
    optimizer = make(twin)
    losses, norms = [], []
    for item in data:
        loss = twin(**item).loss
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(twin.parameters(), clip)))
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach().double() for n, p in twin.named_parameters()}, norms


def shuffled(data: list[Tensors], seed: int) -> list[Tensors]:
    """Returns each batch with its samples in another order."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(item["input_ids"]), generator=generator) for item in data]
    return [
        {k: x[order] for k, x in item.items()} for item, order in zip(data, orders, strict=True)
    ]


def assert_same_run(
    model: nn.Module, make: Make, data: list[Tensors], clip: float | None = None
) -> None:
    """Assert each loss within 1e-5, and each parameter at most twice eager's distance from fp64,
    plus 1e-5. Eager's distance is the largest of three runs, two of them with the samples of each
    batch in other orders: where gradient and decay cancel, one element of Adam's decides it."""
    _, exact, exact_norms = eager_run(model, make, data, torch.float64, clip)
    losses, *plain, norms = eager_run(model, make, data, torch.float32, clip)
    plain += [eager_run(model, make, shuffled(data, i), torch.float32, clip)[1] for i in (1, 2)]
    before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    trainer = onward.Trainer(model, make(model), options=onward.TrainerOptions(max_grad_norm=clip))
    results = [trainer.train_step(item) for item in data]
    assert [float(r.loss) for r in results] == pytest.approx(losses, rel=1e-5)
    if clip is not None:
        found = [float(r.grad_norm) for r in results if r.grad_norm is not None]
        assert found == pytest.approx(norms, rel=1e-5)
        assert found == pytest.approx(exact_norms, rel=1e-5)
    moved = 0.0
    for name, p in model.named_parameters():
        distance = float((p.detach().double() - exact[name]).norm())
        allowed = 2 * max(float((run[name] - exact[name]).norm()) for run in plain) + 1e-5
        if name.endswith("key.bias") and "Adam" in type(trainer.optimizer).__name__:
            # the exact gradient of a key's bias is zero, so Adam divides noise by noise: each
            # engine walks at random, a learning rate a step at most
            allowed = 2 * len(data) * trainer.optimizer.param_groups[1]["lr"] * p.numel() ** 0.5
        assert distance <= allowed, f"{name}: {distance:.3e}, allowed {allowed:.3e}"
        moved += float((p.detach().double() - before[name]).norm())
    assert moved > 0.05, "the run must move the weights, or the comparison says nothing"


def batches(n: int) -> list[Tensors]:
    return [batch(4, 12, "right", seed=i) for i in range(n)]


@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_thirty_steps_of_adamw_with_decay_groups(make: Any) -> None:
    assert_same_run(
        make(dropout=0.0), lambda m: torch.optim.AdamW(groups(m, 0.1), lr=1e-3), batches(30)
    )


OPTIMIZERS: dict[str, Make] = {
    "adam": lambda m: torch.optim.Adam(groups(m, 0.0), lr=1e-3),
    "adam with decay": lambda m: torch.optim.Adam(groups(m, 0.1), lr=1e-3),
    "adamw, other betas": lambda m: torch.optim.AdamW(
        groups(m, 0.1), lr=1e-3, betas=(0.8, 0.95), eps=1e-6
    ),
    "sgd": lambda m: torch.optim.SGD(groups(m, 0.0), lr=0.1),
    "sgd with decay": lambda m: torch.optim.SGD(groups(m, 0.1), lr=0.1),
    "sgd momentum": lambda m: torch.optim.SGD(groups(m, 0.0), lr=0.1, momentum=0.9),
    "sgd dampening": lambda m: torch.optim.SGD(
        groups(m, 0.01), lr=0.1, momentum=0.9, dampening=0.3
    ),
    "sgd nesterov": lambda m: torch.optim.SGD(groups(m, 0.01), lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_six_steps_of_every_optimizer(name: str) -> None:
    assert_same_run(gpt2(dropout=0.0, layers=1), OPTIMIZERS[name], batches(6))


@pytest.mark.parametrize("clip", [0.05, 1e6], ids=["clips", "leaves alone"])
def test_clipping_is_torchs(clip: float) -> None:
    assert_same_run(
        gpt2(dropout=0.0, layers=1), lambda m: torch.optim.SGD(m.parameters(), lr=3.0),
        batches(5), clip,
    )  # fmt: skip


def linear(optimizer: torch.optim.Optimizer) -> Any:
    return get_linear_schedule_with_warmup(optimizer, 2, 6)


def stairs(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.5**n, lambda n: 1.0 / (n + 1)])


@pytest.mark.parametrize("schedule", [linear, stairs])
def test_schedules_are_followed(schedule: Any) -> None:
    """The rate of each group at each step; a scheduler does not warn that no step was taken."""
    data = batches(5)
    model = gpt2(dropout=0.0, layers=1)
    twin = copy.deepcopy(model)
    theirs = torch.optim.SGD(groups(twin, 0.0), lr=0.5)
    follow = schedule(theirs)
    losses, rates = [], []
    for item in data:
        loss = twin(**item).loss
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        losses.append(loss.item())
        rates.append(theirs.param_groups[0]["lr"])
        follow.step()
    optimizer = torch.optim.SGD(groups(model, 0.0), lr=0.5)
    trainer = onward.Trainer(model, optimizer)
    lead = schedule(optimizer)
    for item, loss, rate in zip(data, losses, rates, strict=True):
        result = trainer.train_step(item)
        assert result.lr == rate
        assert float(result.loss) == pytest.approx(loss, rel=1e-5)
        lead.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=name)
    assert len(trainer._steps.train) == 1, "another rate is not another graph"


def run_window(make: Any, data: list[Tensors], dropout: float) -> tuple[nn.Module, list[float]]:
    """One optimizer update over these micro-batches; SGD, so that weights show gradients."""
    model = make(dropout=dropout)
    options = onward.TrainerOptions(gradient_accumulation_steps=len(data), seed=7)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), options=options)
    results = [trainer.train_step(item) for item in data]
    assert [r.updated for r in results] == [False] * (len(data) - 1) + [True]
    assert trainer.updates == 1
    return model, [float(r.loss) for r in results]


@pytest.mark.sample(6)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_two_half_batches_are_one_whole(make: Any, size: int, dropout: float) -> None:
    """Two halves of a batch, in which every label counts, make one whole update; with dropout they
    draw the whole's masks."""
    data = batch(size, 12)
    start = make(dropout=dropout)
    whole, (loss,) = run_window(make, [data], dropout)
    split, (first, second) = run_window(make, halves(data), dropout)
    assert (first + second) / 2 == pytest.approx(loss, rel=1e-6)
    for (name, a), b, old in zip(
        whole.named_parameters(), split.parameters(), start.parameters(), strict=True
    ):
        ga, gb = (old - a).detach(), (old - b).detach()
        assert float(ga.norm()) > 0 or "key.bias" in name or "position" in name
        tolerance = 1e-6 * float(ga.norm()) + 3e-7 * float(
            a.detach().norm()
        )  # the second: p - g rounds
        assert float((ga - gb).norm()) <= tolerance + 1e-8, name
