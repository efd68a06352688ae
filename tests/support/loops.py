"""A plain PyTorch loop beside a Trainer: the oracle of tests that look at whole runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import onward

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
}


class Pair:
    """One model twice: trained by Onward, and by a loop of plain PyTorch."""

    def __init__(
        self,
        model: nn.Module,
        make: MakeOptimizer = OPTIMIZERS["adamw"],
        loss_fn: Callable[..., torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        self.model, self.twin, self.loss_fn = model, copy.deepcopy(model), loss_fn
        self.options = onward.TrainerOptions(seed=1, **options)
        self.trainer = onward.Trainer(model, make(model.parameters()), loss_fn, None, self.options)
        self.optimizer = make(self.twin.parameters())

    def eager_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.loss_fn is not None:
            return self.loss_fn(self.twin(*args[:-1], **kwargs), args[-1])
        outputs = self.twin(*args, **kwargs)
        return outputs if isinstance(outputs, torch.Tensor) else outputs["loss"]

    def eager_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.eager_loss(*args, **kwargs)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self, *args: Any, **kwargs: Any) -> onward.StepResult:
        """Run one step of both; losses and weights have to agree."""
        want, got = self.eager_step(*args, **kwargs), self.trainer.train_step(*args, **kwargs)
        torch.testing.assert_close(got.loss, want, rtol=1e-5, atol=1e-6)
        self.check()
        return got

    def check(self) -> None:
        theirs = dict(self.twin.named_parameters())
        for name, p in self.model.named_parameters():
            torch.testing.assert_close(p, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def frozen_copy(trainer: onward.Trainer) -> dict[str, Any]:
    """Copies of all that a step may change."""
    state = trainer.state_dict()
    return {
        "model": state["model"], "optimizer": state["optimizer"], "updates": state["updates"],
        "counts": state["counts"], "window": (state["micro_steps"], state["samples"]),
        "seed": state["seed"], "generator": state["generator"], "rng": torch.get_rng_state(),
    }  # fmt: skip


def assert_unchanged(before: Any, after: Any, path: str = "") -> None:
    """Assert that nothing has changed, bit for bit."""
    if isinstance(before, dict):
        assert before.keys() == after.keys(), path
        for key in before:
            assert_unchanged(before[key], after[key], f"{path}.{key}")
    elif isinstance(before, torch.Tensor):
        assert torch.equal(before, after), path
    else:
        assert before == after, path
