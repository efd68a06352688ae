"""Small modules of many signatures: what they take, and what they return."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

W = 6
Pair = namedtuple("Pair", ["first", "second"])


class Typed(NamedTuple):
    value: torch.Tensor
    scale: float


@dataclass
class Record:
    value: torch.Tensor
    name: str
    extra: torch.Tensor | None = None


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)


class Positional(Base):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, scale: float = 1.0) -> Any:
        h = torch.tanh(self.a(x)) * scale
        return self.b(h) if y is None else self.b(h) + y


class Keywords(Base):
    def forward(self, *args: torch.Tensor, **kwargs: Any) -> Any:
        h: Any = sum(self.a(x) for x in args) if args else 0.0
        for name in sorted(kwargs):
            value = kwargs[name]
            if isinstance(value, torch.Tensor):
                h = h + self.b(value) * (1.5 if name == "first" else 0.5)
            elif isinstance(value, bool):
                h = torch.relu(h) if value else h
            elif isinstance(value, (int, float)):
                h = h * value
        return h


class Nested(Base):
    """Lists, dicts and Nones, within each other."""

    def forward(self, batch: Any, more: Any = None) -> torch.Tensor:
        h = self._sum(batch) + (0.0 if more is None else self.b(self._sum(more)))
        return self.a(h)

    def _sum(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.float()
        if isinstance(x, dict):
            return sum(self._sum(v) * (i + 1) for i, (_, v) in enumerate(sorted(x.items())))
        if isinstance(x, (list, tuple)):
            return sum(self._sum(v) * (i + 2) for i, v in enumerate(x))
        return 0.0


class Returns(Base):
    """kind: of the container it returns."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("table", torch.arange(W).float())

    def forward(self, x: torch.Tensor) -> Any:
        h, z = self.a(x), torch.tanh(self.b(x))
        match self.kind:
            case "tensor":
                return h
            case "tuple":
                return h, z
            case "list":
                return [h, z]
            case "one":
                return (h,)
            case "dict":
                return {"z": z, "h": h}
            case "ordered dict":
                return OrderedDict(z=z, h=h)
            case "dict of tuples":
                return {"both": (h, z), 3: [h * 2]}
            case "tuple of tuples":
                return (h, (z, (h + z,)), [])
            case "named tuple":
                return Pair(h, z)
            case "typed":
                return Typed(z, 2.5)
            case "dataclass":
                return Record(h, "here")
            case "dict with none":
                return {"h": h, "none": None, "n": 3, "text": "t", "flag": True, "f": 0.5}
            case "twice":
                return {"h": h, "again": h}
            case "views":
                return h, h.view(-1), h.t()
            case "input":
                return {"x": x, "h": h}
            case "parameter":
                return {"w": self.a.weight, "table": self.table, "h": h}
            case "whole numbers":
                return {"h": h, "best": h.argmax(-1), "positive": h > 0}
            case "cut off":
                return {"h": h, "detached": z.detach(), "constant": torch.ones(2)}
            case "lengths":
                return {"h": h, "rows": x.shape[0], "more": 2 * len(x) + 1}
        raise AssertionError(self.kind)


RETURNS = (
    "tensor", "tuple", "list", "one", "dict", "ordered dict", "dict of tuples", "tuple of tuples",
    "named tuple", "typed", "dataclass", "dict with none", "twice", "views", "input", "parameter",
    "whole numbers", "cut off", "lengths",
)  # fmt: skip
