"""Every optimizer that a graph updates by, with all of its settings, and what each is held against.

torch's own class in eager PyTorch; for those that torch lacks, or computes in bf16, the paper's
formula, written here in the precision of the parameter.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import onward

SHAPES = ((), (5,), (4, 6), (6, 3), (2, 3, 4))


class Formula(torch.optim.Optimizer):
    """An optimizer whose rule is a function of a paper's symbols: `rule(p, g, s, t, **settings)`
    changes p and the state s in update t."""

    def __init__(self, rule: Callable[..., None], params: Any, **settings: Any) -> None:
        super().__init__(params, {"maximize": False, **settings})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            settings = {k: v for k, v in group.items() if k not in ("params", "maximize")}
            for p in group["params"]:
                if p.grad is not None:
                    s = self.state[p]
                    s["t"] = s.get("t", 0) + 1
                    g = -p.grad if group["maximize"] else p.grad
                    self.rule(p, g, s, s["t"], **settings)


def lion(
    p: Any, g: Any, s: Any, t: int, lr: float, betas: Any, weight_decay: float, **_: Any
) -> None:
    """arXiv 2302.06675, program 1."""
    m = s.get("m", torch.zeros_like(p))
    c = betas[0] * m + (1 - betas[0]) * g
    p -= lr * (torch.sign(c) + weight_decay * p)
    s["m"] = betas[1] * m + (1 - betas[1]) * g


def lamb(
    p: Any, g: Any, s: Any, t: int, lr: float, betas: Any, eps: float, weight_decay: float,
    bias_correction: bool, adapt: bool, ratio_min: float, ratio_max: float, **_: Any,
) -> None:  # fmt: skip
    """arXiv 1904.00962, algorithm 2, with limits of the ratio."""
    m, v = s.get("m", torch.zeros_like(p)), s.get("v", torch.zeros_like(p))
    s["m"] = m = betas[0] * m + (1 - betas[0]) * g
    s["v"] = v = betas[1] * v + (1 - betas[1]) * g**2
    if bias_correction:
        m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
    u = m / (v.sqrt() + eps) + weight_decay * p
    whole, moved = float(p.norm()), float(u.norm())
    ratio = min(max(whole / moved, ratio_min), ratio_max) if adapt and whole and moved else 1.0
    p -= lr * ratio * u


def muon(
    p: Any, g: Any, s: Any, t: int, lr: float, weight_decay: float, momentum: float, nesterov: bool,
    ns_coefficients: Any, eps: float, ns_steps: int, adjust_lr_fn: str | None, **_: Any,
) -> None:  # fmt: skip
    """kellerjordan.github.io/posts/muon, with torch's averages and rates, nothing in bf16."""
    m = momentum * s.get("m", torch.zeros_like(p)) + (1 - momentum) * g
    s["m"] = m
    x = (1 - momentum) * g + momentum * m if nesterov else m
    a, b, c = ns_coefficients
    tall = p.shape[0] > p.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _i in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    rows, columns = p.shape
    of_adamw = 0.2 * math.sqrt(max(rows, columns))
    rate = of_adamw if adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    p *= 1 - lr * weight_decay
    p -= lr * rate * (x.T if tall else x)


def both(*names: str) -> dict[str, tuple[bool, bool]]:
    return dict.fromkeys(names, (False, True))


DECAY: dict[str, Any] = {"weight_decay": (0.0, 0.1)}
# optimizer -> settings that stay, and those that are tried in every combination
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD": (
        {"lr": 0.05},
        {"momentum": (0.0, 0.9), "dampening": (0.0, 0.3), **both("nesterov", "maximize"), **DECAY},
    ),
    "Adam": ({"lr": 0.01}, {**both("amsgrad", "maximize", "decoupled_weight_decay"), **DECAY}),
    "AdamW": ({"lr": 0.01, "betas": (0.8, 0.95)}, {**both("amsgrad", "maximize"), **DECAY}),
    "RMSprop": ({"lr": 0.01}, {"momentum": (0.0, 0.9), **both("centered", "maximize"), **DECAY}),
    "Adagrad": (
        {"lr": 0.05},
        {
            "lr_decay": (0.0, 0.1), "initial_accumulator_value": (0.0, 0.2), **both("maximize"),
            **DECAY,
        },
    ),
    "Adamax": ({"lr": 0.01}, {**both("maximize"), **DECAY}),
    "NAdam": ({"lr": 0.01}, {**both("maximize", "decoupled_weight_decay"), **DECAY}),
    "RAdam": ({"lr": 0.01}, {**both("maximize", "decoupled_weight_decay"), **DECAY}),
    "Adafactor": (
        {"lr": 0.05},
        {"eps": ((None, 1e-3), (1e-2, 0.1)), "d": (1.0, 1.5), **both("maximize"), **DECAY},
    ),
    "Lion": (
        {"lr": 0.003, "betas": (0.9, 0.99)}, {**both("maximize"), **DECAY},
    ),
    "LAMB": (
        {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "ratio_min": 0.3},
        {
            "ratio_max": (math.inf, 1.5), **both("bias_correction", "adapt", "maximize"),
            **DECAY,
        },
    ),
    "Muon": (
        {
            "lr": 0.02, "momentum": 0.9, "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7,
            "ns_steps": 5,
        },
        {"adjust_lr_fn": ("original", "match_rms_adamw"), **both("nesterov"), **DECAY},
    ),
}  # fmt: skip
FORMULAS: dict[str, Callable[..., None]] = {"Lion": lion, "LAMB": lamb, "Muon": muon}


class UpdateCase(NamedTuple):
    """An optimizer with one combination of settings."""

    name: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        constant = SETTINGS[self.name][0]
        tried = {k: v for k, v in self.settings.items() if k not in constant and v not in (0, None)}
        return "-".join([self.name, *(f"{k}={v}".replace(" ", "") for k, v in tried.items())])

    def reference(self, params: Any) -> torch.optim.Optimizer:
        """What the case is held against."""
        if self.name in FORMULAS:
            return Formula(FORMULAS[self.name], params, **self.settings)
        return getattr(torch.optim, self.name)(params, **self.settings)

    def made(self, params: Any) -> torch.optim.Optimizer:
        """The optimizer as a user makes it: torch's class, or that of a description."""
        if self.name not in ("Lion", "LAMB"):
            return getattr(torch.optim, self.name)(params, **self.settings)
        holder = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1))])
        described = getattr(onward.optim, self.name)(**self.settings)
        return type(onward.train.optim.to_torch(described, holder))(params, **self.settings)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Two shapes to update: a matrix, and one that differs from case to case."""
        other = SHAPES[zlib.crc32(str(self).encode()) % len(SHAPES)]
        return [(4, 6), (6, 3) if self.name == "Muon" else other]


def _valid(name: str, settings: dict[str, Any]) -> bool:
    return not settings.get("nesterov") or name == "Muon" or (
        settings["momentum"] > 0 and settings["dampening"] == 0
    )  # fmt: skip


CASES = [
    UpdateCase(name, settings)
    for name, (constant, tried) in SETTINGS.items()
    for values in itertools.product(*tried.values())
    if _valid(name, settings := {**constant, **dict(zip(tried, values, strict=True))})
]
