"""Forwards that write buffers from one another and from parameters: a next state may be the memory
of another state, which the same step overwrites."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onward

Write = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], object]


def _swap(a: Tensor, b: Tensor, c: Tensor, w: Tensor, x: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def _rotate(a: Tensor, b: Tensor, c: Tensor, w: Tensor, x: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(c)
    c.copy_(kept)


def _add_each_other(a: Tensor, b: Tensor, c: Tensor, w: Tensor, x: Tensor) -> None:
    kept = a.clone()
    a.add_(b)
    b.add_(kept)


def _exchange_sums(a: Tensor, b: Tensor, c: Tensor, w: Tensor, x: Tensor) -> None:
    kept = a + 1
    a.copy_(b * 0.5)
    b.copy_(kept)


def _shift_and_add(a: Tensor, b: Tensor, c: Tensor, w: Tensor, x: Tensor) -> None:
    a.copy_(b)
    b.add_(x)


# by name: writes of three buffers f32[4,4], given a parameter w f32[4,4] and a mean x f32[4]
WRITES: dict[str, Write] = {
    "copy": lambda a, b, c, w, x: a.copy_(b),
    "copy transposed": lambda a, b, c, w, x: a.copy_(b.t()),
    "transpose itself": lambda a, b, c, w, x: a.copy_(a.t().clone()),
    "copy part": lambda a, b, c, w, x: a[0].copy_(b[1]),
    "add": lambda a, b, c, w, x: a.add_(b),
    "copy sum": lambda a, b, c, w, x: a.copy_(a + b),
    "scale": lambda a, b, c, w, x: a.mul_(0.5),
    "mean": lambda a, b, c, w, x: a.copy_(x.expand(4, 4)),
    "mean twice": lambda a, b, c, w, x: b.copy_(a.copy_(x.expand(4, 4))),
    "weight": lambda a, b, c, w, x: a.copy_(w),
    "weight transposed": lambda a, b, c, w, x: a.copy_(w.t()),
    "interpolate": lambda a, b, c, w, x: a.lerp_(b, 0.1),
    "swap": _swap,
    "rotate": _rotate,
    "add each other": _add_each_other,
    "exchange sums": _exchange_sums,
    "shift and add": _shift_and_add,
}


class Memories(nn.Module):
    """A linear layer and a loss of what three buffers held before they are written. writes: their
    names in `WRITES`, each with the order of the buffers that it takes."""

    def __init__(self, writes: list[tuple[str, list[int]]], whole: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.writes, self.whole = writes, whole
        for i in range(3):
            self.register_buffer(f"b{i}", torch.arange(16.0).view(4, 4) / 10 + i)

    def forward(self, x: Tensor) -> dict[str, Tensor] | Tensor:
        buffers = [self.get_buffer(f"b{i}") for i in range(3)]
        a, b, c = buffers
        loss = ((self.layer(x) - a[0] - b[1] * c[:, 2]) ** 2).mean()
        weight, mean = self.layer.weight.detach(), x.detach().mean(0)
        for name, order in self.writes:
            first, second, third = (buffers[i] for i in order)
            WRITES[name](first, second, third, weight, mean)
        return {"loss": loss} if self.whole else loss


def is_eagers(writes: list[tuple[str, list[int]]], loop: str, adam: bool) -> None:
    """Trains three steps beside eager, whose losses, weights and buffers have to be equal."""
    ours = Memories(writes, loop != "accelerate")
    eager = copy.deepcopy(ours)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if adam:
            return torch.optim.AdamW(model.parameters(), lr=0.05)
        return torch.optim.SGD(model.parameters(), lr=0.1)

    own, theirs = optimizer(ours), optimizer(eager)
    options = {"skip_nonfinite": loop == "Trainer, skipping"}
    trainer = onward.Trainer(ours, own, options=options) if ours.whole else None
    forward = None if trainer else onward.accelerate(ours)
    for _ in range(3):
        x = torch.randn(5, 4)
        if trainer is not None:
            loss = torch.as_tensor(trainer.train_step({"x": x}).loss)
        else:
            assert forward is not None
            own.zero_grad()
            loss = forward(x)
            loss.backward()
            own.step()
        theirs.zero_grad()
        expected = eager(x)["loss"] if eager.whole else eager(x)
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            dict(ours.state_dict()), dict(eager.state_dict()), rtol=1e-4, atol=1e-5
        )


LOOPS = ("Trainer", "Trainer, skipping", "accelerate")


@pytest.mark.sample(4)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2]], ids=str)
@pytest.mark.parametrize("name", list(WRITES))
def test_a_write(name: str, order: list[int], loop: str) -> None:
    is_eagers([(name, order)], loop, adam=False)


@pytest.mark.sample(20)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("seed", range(60))
def test_several_writes(seed: int, loop: str) -> None:
    draw = random.Random(seed)
    names = draw.choices(list(WRITES), k=draw.randint(2, 5))
    is_eagers([(name, draw.sample(range(3), 3)) for name in names], loop, seed % 2 == 1)
