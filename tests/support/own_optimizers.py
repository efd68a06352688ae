"""Optimizers that no graph has: torch's, a package's, and small ones that do what users' do."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

Group = dict[str, Any]
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


class Heavy(torch.optim.Optimizer):
    """SGD with momentum whose weight decay is written into the gradient itself."""

    def __init__(self, params: Any, lr: float = 0.05, decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=group["decay"])
                    kept = self.state[p].setdefault("velocity", torch.zeros_like(p))
                    kept.mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * kept)


class Signed(torch.optim.AdamW):
    """AdamW with a step of its own: it follows the gradients' signs."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.sign_()
        return super().step(closure)


class Shrinking(torch.optim.AdamW):
    """A subclass of AdamW that makes weights smaller after each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)


class Renamed(torch.optim.SGD):
    """A subclass that changes nothing."""


class Momentary(torch.optim.Optimizer):
    """An optimizer that keeps the last gradient itself, not a copy, and moves by the sum of two."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = self.state[p].get("before")
                    moved = p.grad if before is None else p.grad + before
                    p.sub_(group["lr"] * moved)
                    self.state[p]["before"] = p.grad


class Replacing(torch.optim.Optimizer):
    """SGD that puts each parameter into new memory, by `p.data`; it has no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - 0.05 * p.grad


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2024): the weights are y, an average of z and x."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            rate, beta = 1 / group["k"], group["beta"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    x = (p - (1 - beta) * z) / beta
                    z.sub_(p.grad, alpha=group["lr"])
                    x.lerp_(z, rate)
                    p.copy_(beta * x + (1 - beta) * z)


class Rotated(torch.optim.Optimizer):
    """Adam in the eigenbasis of a matrix gradient's covariance, as SOAP (Vyas et al., 2024)."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, kept = p.grad, self.state[p]
                if not kept:
                    kept.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                    kept["covariance"] = torch.eye(p.shape[0], dtype=p.dtype)
                basis = kept["covariance"] if g.dim() == 2 else None
                if basis is not None:
                    basis.lerp_(g @ g.T, 0.05)
                    g = 0.5 * (g + basis @ g / basis.norm())
                kept["step"] += 1
                kept["m"].lerp_(g, 1 - first)
                kept["v"].lerp_(g.square(), 1 - second)
                size = math.sqrt(1 - second ** kept["step"]) / (1 - first ** kept["step"])
                p.sub_(group["lr"] * size * kept["m"] / (kept["v"].sqrt() + 1e-8))


def adafactor(groups: Iterable[Any]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(groups, scale_parameter=True, relative_step=True, warmup_init=True, lr=None)


def hooked(groups: Iterable[Any]) -> torch.optim.Optimizer:
    """AdamW with a hook that writes to the gradients before each step."""
    made = torch.optim.AdamW(groups, lr=0.02)

    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(torch.where(p.grad > 0, 1.0, 0.5))

    made.register_step_pre_hook(halve)
    return made


def schedule_free(groups: Iterable[Any]) -> torch.optim.Optimizer:
    made = importlib.import_module("schedulefree").AdamWScheduleFree(groups, lr=0.02)
    made.train()
    return made


def soap(groups: Iterable[Any]) -> torch.optim.Optimizer:
    return importlib.import_module("pytorch_optimizer").SOAP(groups, lr=0.02)


MAKERS: dict[str, Make] = {
    "a user's own": Heavy,
    "a subclass with its own step": lambda groups: Signed(groups, lr=0.01),
    "a subclass that changes nothing": lambda groups: Renamed(groups, lr=0.1, momentum=0.9),
    "one that keeps gradients": Momentary,
    "one that moves parameters": Replacing,
    "schedule-free": ScheduleFree,
    "rotated": Rotated,
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
    "ASGD": lambda groups: torch.optim.ASGD(groups, lr=0.1, lambd=0.01, t0=2),
    "Adadelta, not foreach": lambda groups: torch.optim.Adadelta(groups, lr=2.0, foreach=False),
    "with a hook": hooked,
    "transformers' Adafactor": adafactor,
}
PACKAGES: dict[str, tuple[str, Make]] = {
    "schedulefree's AdamW": ("schedulefree", schedule_free),
    "pytorch_optimizer's SOAP": ("pytorch_optimizer", soap),
}

__all__ = ["MAKERS", "PACKAGES", "Heavy", "Make", "Momentary", "Renamed", "Shrinking", "Signed"]
