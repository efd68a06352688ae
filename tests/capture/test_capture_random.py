"""Random numbers that a forward draws besides dropout: their distributions, and the gradients of
what is done with them beside eager PyTorch's, which is given the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import onward

N, D = 80, 50


class Drawing(torch.nn.Module):
    """Gives what `draw` draws; the loss weighs a linear layer's output by it."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.draw = torch.nn.Linear(4, 1), draw

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        drawn = self.draw(x)
        rows = drawn.float().reshape(x.shape[0], -1).mean(1)
        return {"loss": (self.inner(x)[:, 0] * rows).sum(), "drawn": drawn}


def trainer_of(draw: Callable[[torch.Tensor], torch.Tensor], window: int = 1) -> onward.Trainer:
    torch.manual_seed(0)
    model = Drawing(draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = onward.TrainerOptions(gradient_accumulation_steps=window)
    return onward.Trainer(model, optimizer, options=options)


def drawn_by(trainer: onward.Trainer, x: torch.Tensor) -> torch.Tensor:
    return trainer.train_step(x, fetch=["drawn"]).outputs["drawn"].clone()


# what is drawn; mean and variance of an element; the least and the largest that there may be
DRAWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float, float, float]] = {
    "rand": (lambda x: torch.rand(x.shape[0], D), 0.5, 1 / 12, 0, 1),
    "rand of one dim": (lambda x: torch.rand(x.shape[0]), 0.5, 1 / 12, 0, 1),
    "rand_like": (lambda x: torch.rand_like(x.expand(2, -1, -1)).mT, 0.5, 1 / 12, 0, 1),
    "uniform_": (lambda x: x.new_empty(x.shape[0], D).uniform_(2, 4), 3.0, 4 / 12, 2, 4),
    "bernoulli_": (lambda x: x.new_empty(x.shape[0], D, 1).bernoulli_(0.7), 0.7, 0.21, 0, 1),
    "bernoulli_ of a tensor": (
        lambda x: x.new_empty(x.shape[0], D).bernoulli_(torch.full((D,), 0.2)), 0.2, 0.16, 0, 1
    ),
    "bernoulli": (lambda x: torch.bernoulli(torch.full((x.shape[0], D), 0.3)), 0.3, 0.21, 0, 1),
    "bernoulli of whole numbers": (
        lambda x: torch.zeros(x.shape[0], D, dtype=torch.int64).bernoulli_(0.5), 0.5, 0.25, 0, 1
    ),
    "randn": (lambda x: torch.randn(x.shape[0], D), 0.0, 1.0, -7, 7),
    "randn_like": (lambda x: torch.randn_like(x), 0.0, 1.0, -7, 7),
    "normal_": (lambda x: x.new_empty(x.shape[0], D).normal_(3.0, 2.0), 3.0, 4.0, -11, 17),
    "normal": (lambda x: torch.normal(1.0, 0.5, (x.shape[0], D)), 1.0, 0.25, -3, 5),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.25, 1e-9, 9),
    "randint": (lambda x: torch.randint(7, (x.shape[0], D)), 3.0, 4.0, 0, 6),
    "randint from": (lambda x: torch.randint(-2, 3, (x.shape[0], D)), 0.0, 2.0, -2, 2),
    "randint_like": (lambda x: torch.randint_like(x, 3, 9), 5.5, 35 / 12, 3, 8),
    "randperm": (lambda x: torch.randperm(x.shape[0]), (N - 1) / 2, (N**2 - 1) / 12, 0, N - 1),
    "multinomial": (
        lambda x: torch.multinomial(
            torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0]).expand(x.shape[0], 6), D, True
        ),
        2.25, 1.6875, 1, 4,
    ),
    "multinomial of rows": (
        lambda x: torch.multinomial(torch.tensor([0.0, 0.3, 0.7]).expand(x.shape[0], 3), 1),
        1.7, 0.21, 1, 2,
    ),
    "multinomial, each once": (
        lambda x: torch.multinomial(torch.ones(x.shape[0], 4), 4).flip(0), 1.5, 1.25, 0, 3,
    ),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x * 0, hard=True), 0.25, 3 / 16, 0, 1),
    "dropout2d": (
        lambda x: F.dropout2d(x.new_ones(x.shape[0], D, 2, 3), 0.25), 1.0, 1 / 3, 0, 1.334
    ),
    "a path dropped": (
        lambda x: x.div(0.8) * 0 + (0.8 + torch.rand((x.shape[0], 1))).floor_(), 0.8, 0.16, 0, 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_of_their_distribution_and_each_step_draws_others(name: str) -> None:
    draw, mean, variance, least, largest = DRAWS[name]
    trainer = trainer_of(draw)
    x = torch.randn(N, 4)
    steps = [drawn_by(trainer, x) for _ in range(20)]
    expected = draw(x)
    assert all(s.shape == expected.shape and s.dtype == expected.dtype for s in steps)
    assert all(not torch.equal(a, b) for a, b in pairwise(steps))
    numbers = torch.stack(steps).double().flatten(1)
    assert least <= float(numbers.min()) and float(numbers.max()) <= largest
    independent = {"dropout2d": 6, "a path dropped": 4}.get(name, 1)
    error = math.sqrt(variance * independent / numbers.numel())
    assert abs(float(numbers.mean()) - mean) < 5 * error + (name == "randperm")
    assert abs(float(numbers.var()) / variance - 1) < 0.15


@pytest.mark.parametrize("name", ["rand", "bernoulli_", "randn", "gumbel_softmax"])
def test_gradients_are_eagers_with_the_same_numbers(name: str) -> None:
    draw = DRAWS[name][0]
    trainer = trainer_of(draw)
    trainer.optimizer.param_groups[0]["lr"] = 1.0
    x = torch.randn(9, 4)
    model = trainer.model
    before = [p.detach().clone() for p in model.parameters()]
    result = trainer.train_step(x, fetch=["drawn"])
    rows = result.outputs["drawn"].float().reshape(9, -1).mean(1)
    weights = [p.requires_grad_() for p in before]
    loss = (F.linear(x, *weights)[:, 0] * rows).sum()
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-5, atol=1e-6)
    for p, was in zip(model.parameters(), weights, strict=True):
        assert was.grad is not None
        torch.testing.assert_close(p.detach(), was.detach() - was.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rand", "rand of one dim", "bernoulli_", "randn", "dropout2d"])
def test_micro_batches_draw_what_the_whole_batch_draws(name: str) -> None:
    draw = DRAWS[name][0]
    x = torch.randn(8, 4)
    torch.manual_seed(3)
    whole = drawn_by(trainer_of(draw), x)
    torch.manual_seed(3)
    trainer = trainer_of(draw, window=2)
    parts = [drawn_by(trainer, part) for part in x.split(4)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


def test_two_draws_of_a_step_are_unlike() -> None:
    trainer = trainer_of(lambda x: torch.stack([torch.rand(x.shape[0], D) for _ in range(2)], 1))
    a, b = drawn_by(trainer, torch.randn(N, 4)).unbind(1)
    together = torch.stack([a.flatten(), b.flatten()])
    assert abs(float(torch.corrcoef(together)[0, 1])) < 0.06


def test_a_generator_of_its_own_is_refused() -> None:
    generator = torch.Generator()
    trainer = trainer_of(lambda x: x * torch.rand(4, generator=generator))
    with pytest.raises(onward.CaptureError, match=r"torch\.Generator|which is not a tensor"):
        trainer.train_step(torch.randn(4, 4))


def test_verify_says_that_there_is_nothing_to_compare() -> None:
    trainer = trainer_of(DRAWS["rand"][0])
    with pytest.raises(onward.OnwardError, match=r"draws random numbers at .*; fix: "):
        trainer.verify(torch.randn(4, 4))


def test_dropout_of_one_number() -> None:
    """A number is kept and scaled, or dropped, as in eager PyTorch."""
    trainer = trainer_of(lambda x: F.dropout(x.sum(), 0.25, True).expand(x.shape[0]))
    x = torch.ones(3, 4)
    found = [float(drawn_by(trainer, x)[0]) for _ in range(60)]
    assert set(found) == {0.0, 16.0}
    assert 30 < sum(number > 0 for number in found) < 57
