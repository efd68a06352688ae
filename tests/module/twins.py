"""An accelerated model and the same in eager PyTorch, side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

import onward
from onward.module import accelerated

CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-6}


class Twins:
    """Two equal models. ours: the accelerated one; eager: a copy from before. `calls` counts calls
    that ran as a graph."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.eager: Any = copy.deepcopy(model)
        self.ours: Any = onward.accelerate(model, **options)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.ours, self.eager

    def each(self, act: Callable[[Any], Any]) -> tuple[Any, Any]:
        """The results of `act` on each model, from the same random state."""
        state = torch.get_rng_state()
        ours = act(self.ours)
        torch.set_rng_state(state)
        return ours, act(self.eager)

    def same(self, act: Callable[[Any], Any]) -> Any:
        """Assert that `act(model)` gives the same for each: containers, their classes, tensors."""
        ours, eager = self.each(act)
        assert_same(ours, eager)
        return ours

    def same_gradients(self) -> None:
        """Assert that both models have equal gradients, and none for the same parameters."""
        for (name, p), q in zip(self.ours.named_parameters(), self.eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{name}: {p.grad is None}"
            if p.grad is not None and q.grad is not None:
                most = float(q.grad.abs().max()) if q.grad.numel() else 0.0
                torch.testing.assert_close(
                    p.grad, q.grad, rtol=2e-4, atol=2e-6 + 2e-5 * most,
                    msg=lambda m, n=name: f"{n} {m}",
                )  # fmt: skip

    def same_buffers(self) -> None:
        for (name, b), c in zip(self.ours.named_buffers(), self.eager.buffers(), strict=True):
            torch.testing.assert_close(b, c, **CLOSE, msg=lambda m, n=name: f"{n} {m}")

    def step(self, act: Callable[[Any], Any]) -> Any:
        """Run a forward, and a backward of the sum of all floating outputs; assert that both models
        agree."""
        found = self.same(act)
        for model, outputs in zip(self.both, self.each(act), strict=True):
            total(outputs).backward()
            del model
        self.same_gradients()
        return found

    def zero(self, **how: Any) -> None:
        for model in self.both:
            model.zero_grad(**how)

    def ran(self) -> bool:
        """Whether any call ran as a graph."""
        held = accelerated(self.ours)
        return held is not None and held._last is not None


@contextmanager
def moved_away() -> Iterator[None]:
    """A context in which saved tensors are stored elsewhere, as `save_on_cpu` does for a GPU; that
    leaves those of a CPU in place."""
    copied = mock.patch.object(torch.Tensor, "cpu", torch.Tensor.clone)
    with copied, torch.autograd.graph.save_on_cpu():
        yield


def total(outputs: Any) -> torch.Tensor:
    """A scalar that depends on every floating output that has a gradient, on each otherwise."""
    tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    parts = [t for t in tensors if t.requires_grad]
    return torch.stack([(i + 1.0) * t.double().sin().sum() for i, t in enumerate(parts)]).sum()


def assert_same(ours: Any, eager: Any) -> None:
    assert type(ours) is type(eager), (type(ours), type(eager))
    a, spec = pytree.tree_flatten(ours)
    b, other = pytree.tree_flatten(eager)
    assert spec == other, (spec, other)
    for x, y in zip(a, b, strict=True):
        assert type(x) is type(y), (type(x), type(y))
        if isinstance(x, torch.Tensor):
            assert x.requires_grad == y.requires_grad
            torch.testing.assert_close(x.detach(), y.detach(), **CLOSE)
        else:
            assert x == y
