"""Choices by a batch's numbers: each side as in eager, chosen anew for every batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor

import onward

Form = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Net(torch.nn.Module):
    """`form(self, x * w, mask)`, squared."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.w = form, torch.nn.Parameter(torch.linspace(0.5, 1.0, 5))
        self.register_buffer("count", torch.zeros(5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.form(self, x * self.w, mask).square().mean()


def nothing_hidden(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A branch on `mask.any()`, as in the embeddings of ESM-2."""
    if not mask.any():
        return x
    return x * mask[..., None].float()


def three(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.all():
        x = x * 2
    if (mask.sum() > 3) and mask[0].any():
        x = x + 1
    return x if mask[:, -1].any() else x.tanh()


def without_gradients(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        seen = mask.float().mean() > 0.5
    return x * 3 if seen else x


def loop(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A loop that drops the columns at the left that nobody sees."""
    n = 0
    while n < mask.shape[1] - 1 and not mask[:, n].any():
        n += 1
    return x[:, n:]


def of_sizes(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * 2 if mask.sum() == x.shape[0] * x.shape[1] else x


def asserted(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    assert (mask | ~mask).all()
    return x


def counted_as_another(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A check of how many elements a mask selects, as LLaVA makes of its image tokens in
    transformers 4; it reads nothing of `x` but the shape."""
    wide = mask.unsqueeze(-1).expand_as(x)
    return x * 2 if x[wide].numel() != x.numel() else x


def written_later(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    seen = mask.clone()
    x = x * 2 if seen.any() else x
    seen.fill_(False)
    return x + seen[..., None].float()


def written_before(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Writes into the asked tensor through its views: only the first column stays, with one mark
    added."""
    seen = mask.clone()
    seen.t()[1:].zero_()
    seen[0, 3:].logical_or_(mask[1, 1:2])
    return x * 2 if seen.any() else x


def of_constants(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A constant from torch.distributions, as in Gemma 3n: its arguments are checked by branches,
    and only torch has its icdf."""
    normal = torch.distributions.Normal(0.0, 1.0)
    return x * normal.icdf(torch.tensor(0.95)) * 2 if mask.any() else x


def layers_dropped_never(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A layer dropped with probability 0, as BART's layerdrop."""
    return x * 0 if torch.rand([]) < 0.0 else x


def traced(x: torch.Tensor) -> bool:
    """Whether a tensor is traced, asked as transformers asks it."""
    return isinstance(x, FakeTensor)


def asked_in_eager_alone(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A question asked in eager mode alone, as by transformers' masks and by
    torch.distributions."""
    if not traced(x) and not mask.all():
        x = x * 1.0
    return x * 2 if mask[0].any() else x


HONOURED = (
    asked_in_eager_alone, nothing_hidden, three, without_gradients, loop, of_sizes, asserted,
    counted_as_another, written_later, written_before, of_constants, layers_dropped_never,
)  # fmt: skip


def masks() -> list[torch.Tensor]:
    one = torch.zeros(3, 4, dtype=torch.bool)
    mixed = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) > 0.5
    return [one, one | True, mixed, one, one.index_fill(1, torch.tensor([2]), True), ~mixed]


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", HONOURED)
def test_each_batch_has_the_side_that_it_chooses(form: Form) -> None:
    model = Net(form)
    twin = copy.deepcopy(model)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for mask in masks():
        x = torch.randn(3, 4, 5, generator=generator)
        optimizer.zero_grad()
        loss = twin(x, mask)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.train_step(x, mask).loss, loss.detach())
        torch.testing.assert_close(model.w, twin.w)


def test_a_side_is_captured_once(captures: list[int]) -> None:
    model = Net(nothing_hidden)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for mask in [*masks(), *masks()]:
        trainer.train_step(torch.randn(3, 4, 5), mask)
    assert len(captures) == 2


def of_parameters(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x if (net.w > 0.7).any() else -x


def of_a_buffer(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x if net.count.any() else -x


def of_chance(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x if torch.rand([]) < 0.5 else -x


@pytest.mark.parametrize("form", [of_parameters, of_a_buffer, of_chance])
def test_what_the_batch_does_not_decide_is_refused(form: Form) -> None:
    model = Net(form)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, before = torch.randn(3, 4, 5), torch.get_rng_state()
    with pytest.raises(onward.CaptureError, match="data-dependent control flow"):
        trainer.train_step(x, masks()[1])
    assert torch.equal(before, torch.get_rng_state())


def test_what_eager_asserts_is_asserted() -> None:
    def form(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert mask.any(), "nothing to see"
        return x

    model = Net(form)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train_step(torch.randn(3, 4, 5), masks()[1])
    with pytest.raises(onward.CaptureError, match="nothing to see"):
        trainer.train_step(torch.randn(3, 4, 5), masks()[0])


def test_an_answer_to_another_question_is_seen() -> None:
    def form(net: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for row in mask[1:] if traced(x) else mask:
            x = x * 2 if row.any() else x
        return x

    model = Net(form)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mask = torch.tensor([[True] * 4, [False] * 4, [True] * 4])
    with pytest.raises(onward.CaptureError, match=r"branches on other tensors in a trace .*; fix"):
        trainer.train_step(torch.randn(3, 4, 5), mask)
