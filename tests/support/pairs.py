"""One model trained by Onward, its twin by a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import onward
from onward import TrainerOptions

loss_fn = nn.functional.cross_entropy
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(6) % 3
KINDS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class MicroPair:
    """One model trained by Onward, its twin by a plain loop, micro-batch by micro-batch and update
    by update as a test asks for them; `loops.Pair` takes whole steps."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], every: int = 1) -> None:
        self.model, self.twin = net(), net()
        self.ours, self.theirs = make(self.model.parameters()), make(self.twin.parameters())
        options = TrainerOptions(gradient_accumulation_steps=every)
        self.trainer = onward.Trainer(self.model, self.ours, loss_fn=loss_fn, options=options)
        self.every = every

    def both(self, change: Callable[[torch.optim.Optimizer, list[Any]], Any]) -> None:
        change(self.ours, list(self.model.parameters()))
        change(self.theirs, list(self.twin.parameters()))

    def micro(self) -> None:
        """One micro-batch each; the plain loop's update is `update`."""
        self.trainer.train_step(X, Y)
        (loss_fn(self.twin(X), Y) / self.every).backward()

    def update(self) -> None:
        self.theirs.step()
        self.theirs.zero_grad()

    def steps(self, n: int) -> None:
        for _ in range(n):
            for _ in range(self.every):
                self.micro()
            self.update()

    def assert_alike(self) -> None:
        for p, q in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            have, want = self.ours.state.get(p, {}), self.theirs.state.get(q, {})
            torch.testing.assert_close(dict(have), dict(want), rtol=1e-4, atol=1e-6)
