"""Memory of accelerated models that has to go before more is asked for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import Positional, W
from torch.utils.checkpoint import checkpoint
from twins import total

import onward
from onward.execute.memory import Memory
from onward.module import accelerated


class _SetsItsKind(torch.nn.Module):
    """A module whose forward sets an attribute of it, as Transformers' classifiers set
    `config.problem_type`. Autograd saves the results of exp and softmax, which their own gradients
    read."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(W, W)
        self.kind: str | None = None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.kind is None:
            self.kind = "rows"
        return {"y": self.a(x).exp().softmax(-1)}


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context without garbage collection: only what nothing refers to is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _on_a_tape() -> int:
    """The number of real tensors that autograd has made and something holds."""
    found = (x for x in gc.get_objects() if type(x) is torch.Tensor)
    return sum(x.grad_fn is not None for x in found)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_runs_that_a_capture_makes_leave_no_activations(checkpointed: bool) -> None:
    """A forward that sets something is also run in eager; what autograd saved then is freed."""
    model, x = onward.accelerate(_SetsItsKind()), torch.randn(3, W)
    # the first export of a process imports what holds the frames that it was imported from
    onward.accelerate(_SetsItsKind())(x)
    with _no_collection():
        before = _on_a_tape()
        out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        out["y"].sum().backward()
        del out
        assert _on_a_tape() == before
    held = accelerated(model)
    assert held is not None and held.launches  # it ran as a graph


def test_a_larger_batch_does_not_find_the_smaller_ones_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches hold the block of the batch before; it is freed before a larger one is made."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    original: Any = Memory._block

    def block(self: Memory, *arguments: Any) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in made))
        tensor = original(self, *arguments)
        made.append(weakref.ref(tensor))
        return tensor

    model = onward.accelerate(Positional())
    with _no_collection():
        total(model(torch.randn(2, W))).backward()
        model.zero_grad()
        held: Any = accelerated(model)
        held.memory.blocks.clear()
        monkeypatch.setattr(Memory, "_block", block)
        for rows in (2, 64, 1024, 8192):
            total(model(torch.randn(rows, W))).backward()
            model.zero_grad()
    assert len(alive) > 2
    assert alive == [0] * len(alive)
