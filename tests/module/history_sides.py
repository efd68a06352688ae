"""The two sides of a history, and the table of actions; the model's forward depends on whatever a
module may hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import onward

W = 4
Step = tuple[str, int]


# ---- the model


@dataclass
class Config:
    scale: float = 1.0
    layers: list[int] = field(default_factory=lambda: [1])
    nested: dict[str, Any] = field(default_factory=lambda: {"deep": {"add": 0.0, "list": [0.5]}})


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(W, W), nn.LayerNorm(W), nn.Dropout(0.0)
        self.gain: Any = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.norm(self.lin(x)))) * self.gain


class Apart(nn.Module):
    """A part that no graph can hold; it sets a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(W, W)
        self.scale, self.calls, self.sizes = 0.5, 0, [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(2):
            x = torch.tanh(self.inner(x)) * self.scale + x * self.sizes[-1]
            if float(x.detach().abs().sum()) < 1.93:
                break
        return x


class Model(nn.Module):
    """A model whose forward depends on whatever a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.head = Part(), Part(), nn.Linear(W, W)
        self.bn = nn.BatchNorm1d(W)
        self.config, self.extra, self.flags = Config(), nn.ModuleList(), {"twice": False}
        self.register_buffer("shift", torch.zeros(W))
        self.register_buffer("maybe", None)
        self.checkpointing, self.how = False, "tanh"

    def bend(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def forward(
        self, x: Any, how: Any = None, *, mask: Any = None, back: Any = "tensor", **more: Any
    ) -> Any:
        total: Any = sum(pytree.tree_leaves(x)) if isinstance(x, (list, tuple, dict)) else x
        h = (
            checkpoint(self.first, total, use_reentrant=False)
            if self.checkpointing
            else (self.first(total))
        )
        if self.flags["twice"]:
            h = self.second(h)
        for _ in self.config.layers:
            h = self.second(h)
        for part in self.extra:
            h = part(h)
        if self.training and h.dim() == 2 and h.shape[0] > 1:
            h = h + 0.1 * self.bn(h)
        shift: Any = self.shift
        h = self.bend(h) if self.how == "tanh" else torch.relu(h)
        h = h * self.config.scale + shift + self.config.nested["deep"]["add"]
        if self.maybe is not None:
            h = h + self.maybe
        if mask is not None:
            h = h.masked_fill(mask, 0.25)
        for name in sorted(more):
            h = h + more[name] * len(name)
        y = self.head(h) + torch.full((W,), 0.125)  # of the default dtype
        if how is not None:
            y = y * how
        match back:
            case "tensor":
                return y
            case "pair":
                return y, h
            case "dict":
                return {"y": y, "none": None, "h": h.detach(), "x": x, "n": 3}
            case "view":
                return y, y.view(-1), y.sum(), y.argmax(-1)
        raise AssertionError(back)


# ---- a side


class Stop(BaseException):
    """A BaseException that is no Exception, like KeyboardInterrupt."""


@dataclass
class Side:
    """model: what is called. ours: whether it is the accelerated one."""

    model: Any
    ours: bool
    losses: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    log: list[Any] = field(default_factory=list)
    modes: dict[str, Any] = field(default_factory=dict)
    rounded: bool = False  # whether autocast was on: the sides round differently

    @property
    def core(self) -> Any:
        """The model itself, where a wrapper is called."""
        return self.model.module if isinstance(self.model, onward.Module) else self.model

    def drop(self) -> None:
        self.losses.clear()
        self.inputs.clear()


def new_sides() -> tuple[Side, Side]:
    model = Model()
    return Side(onward.accelerate(copy.deepcopy(model)), True), Side(model, False)


Action = Callable[[Side, int], Any]
ACTIONS: dict[str, Action] = {}
MUTATIONS: list[str] = []


def action(function: Action) -> Action:
    ACTIONS[function.__name__] = function
    return function


def mutation(function: Action) -> Action:
    """An action that changes what forwards that are outstanding have read, so these are dropped."""

    def act(s: Side, k: int) -> Any:
        s.drop()
        return function(s, k)

    ACTIONS[function.__name__] = act
    MUTATIONS.append(function.__name__)
    return function
