"""Gradients of results of an accelerated model: eager PyTorch's, or one clear refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import batch, gpt2
from torch import nn

import onward

REFUSED = r"on the result \w+.* of an accelerated model, from which its result \w+ is computed"


class Stages(nn.Module):
    """Returns hidden f32[B,8], two outputs of it, and the mean of the first, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.a(x).tanh()
        first = self.b(hidden)
        return {
            "hidden": hidden, "first": first, "second": self.c(hidden),
            "loss": first.square().mean(), "also": first,
        }  # fmt: skip


Ask = Callable[[torch.Tensor], Any]
ASKS: dict[str, Ask] = {
    "retain_grad": lambda t: t.retain_grad(),
    # a hook on a result that no gradient arrives at is called with None
    "a hook that changes it": lambda t: t.register_hook(lambda g: None if g is None else g * 0),
    "a hook that reads it": lambda t: t.register_hook(lambda g: None),
    "a hook on several": lambda t: torch.autograd.graph.register_multi_grad_hook(
        [t], lambda _: None
    ),
}


def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def same(ours: Stages, theirs: Stages) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(p.grad, q.grad, msg=name)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize(
    ("asked", "ends"),
    [
        ("hidden", ["loss"]), ("hidden", ["first"]), ("first", ["loss"]), ("hidden", ["second"]),
        ("hidden", ["loss", "hidden"]), ("first", ["first", "loss"]),
    ],
)  # fmt: skip
def test_gradients_within_a_call_are_refused(ask: str, asked: str, ends: list[str]) -> None:
    model = onward.accelerate(Stages())
    for step in range(3):  # the first backward, and those that know what it needs
        found = model(x())
        ASKS[ask](found[asked])
        with pytest.raises(onward.OnwardError, match=REFUSED):
            torch.stack([found[name].sum() for name in ends]).sum().backward()
        assert step or all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize(
    ("asked", "ends"),
    [
        ("loss", ["loss"]), ("first", ["first"]), ("first", ["second"]), ("loss", ["first"]),
        ("second", ["loss"]), ("second", ["loss", "second"]), ("first", ["also"]),
    ],
)  # fmt: skip
def test_gradients_where_a_call_ends_are_eagers(ask: str, asked: str, ends: list[str]) -> None:
    torch.manual_seed(0)
    ours, theirs = onward.accelerate(Stages()), Stages()
    theirs.load_state_dict(ours.state_dict())
    for _ in range(3):
        grads = []
        for model in (ours, theirs):
            model.zero_grad()
            found = model(x())
            ASKS[ask](found[asked])
            torch.stack([found[name].sum() for name in ends]).sum().backward()
            grads.append(found[asked].grad if ask == "retain_grad" else None)
        same(ours, theirs)
        if grads[1] is None:
            assert grads[0] is None
        else:
            torch.testing.assert_close(*grads)


def test_results_that_are_read_late() -> None:
    """The hidden states of a model of transformers, which no call before has read."""
    model = onward.accelerate(gpt2(dropout=0.0))
    data = batch()
    for step in range(3):
        found = model(**data, output_hidden_states=True)
        if step:
            found.hidden_states[1].retain_grad()
            with pytest.raises(onward.OnwardError, match=REFUSED):
                found.loss.backward()
        else:
            found.loss.backward()
    with onward.eager():
        found = model(**data, output_hidden_states=True)
        found.hidden_states[1].retain_grad()
        found.loss.backward()
        assert found.hidden_states[1].grad.norm() > 0


def test_hooks_of_a_result_that_is_gone() -> None:
    model = onward.accelerate(Stages())
    found = model(x())
    found["hidden"].retain_grad()
    loss = found["loss"]
    del found
    loss.backward()
    assert model.a.weight.grad is not None
