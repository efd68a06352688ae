"""Signum as PyTorch has its optimizers. A Trainer takes an instance of it, and reads its groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Signum(torch.optim.Optimizer):
    """Signum (arXiv 1802.04434), with decoupled weight decay. State by parameter: `exp_avg`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        beta: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update in eager PyTorch; a Trainer does it in its graph instead."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, beta = group["lr"], group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"].lerp_(p.grad, 1 - beta)
                p.mul_(1 - lr * group["weight_decay"]).add_(m.sign(), alpha=-lr)
        return loss
