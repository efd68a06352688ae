"""Models with parts that no graph can hold, by what stands in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

D, V = 8, 13


class Numpy(nn.Module):
    """A part that leaves PyTorch for numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = float(x.detach().numpy().mean() > 0) + 0.5
        return torch.relu(self.linear(x)) * factor + x


class Loop(nn.Module):
    """A part whose loop goes on as long as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(self.linear(x))
            if float(x.detach().norm()) < 2.0:
                break
        return x


class Chosen(nn.Module):
    """A part that works on rows chosen by the data, in a way that depends on how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        rows = (flat.sum(-1) > 0).nonzero().squeeze(-1)
        y = flat.clone()
        if len(rows) > 1:
            y[rows] = self.linear(flat[rows]) / len(rows) ** 0.5
        return y.view_as(x)


class OddFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scale = float(x.detach().numpy().std())
        ctx.save_for_backward(x)
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        (x,) = ctx.saved_tensors
        return dys[0] * ctx.scale + 0.1 * x.sign()


class Function(nn.Module):
    """A part with a backward of its own, through numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OddFunction.apply(self.linear(x))  # type: ignore[return-value]


class Norm(nn.Module):
    """A part that writes running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.norm(x.flatten(0, 1)))
        if float(y.detach().numpy().max()) > 100:
            y = y * 2
        return y.view_as(x)


class Nested(nn.Module):
    """A part that takes and returns several tensors, nested, with other values between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def pair(self, x: torch.Tensor, more: dict[str, Any], flag: bool) -> Any:
        return x, more, flag

    def forward(self, x: torch.Tensor, more: dict[str, Any], *, flag: bool = False) -> Any:
        rows = int(x.detach().numpy().shape[0])
        y = self.linear(x) * more["weight"] + rows * 0.0
        return {"y": y, "parts": (y.mean(-1), None, [y.argmax(-1)])}


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Nested()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(x, {"weight": x.sigmoid(), "name": "w"}, flag=True)
        mean, _, (best,) = made["parts"]
        return made["y"] + mean.unsqueeze(-1) + best.unsqueeze(-1).float()


class Twice(nn.Module):
    """A model that calls one part at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Numpy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.part(x).sin())


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Numpy()
        self.part.linear.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


class Operator(nn.Module):
    """A part that calls operators without a translation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        return torch.special.i1(y) + torch.linalg.matrix_exp(0.1 * y @ y.mT)[..., :1]


class Hooked(nn.Module):
    """A part with a forward hook, which counts and changes its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(D, D), 0
        self.linear.register_forward_hook(self.see)

    def see(self, module: nn.Module, args: Any, y: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return y * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() + x


class Counting(nn.Module):
    """A part that sets numbers of its own, which a later run reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(D, D), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scale = 1.0 + 0.1 * self.calls + 0.0 * float(x.detach().numpy().sum())
        return self.linear(x) * scale


PARTS: dict[str, Callable[[], nn.Module]] = {
    part.__name__: part
    for part in (
        Numpy, Loop, Chosen, Function, Norm, Takes, Twice, Frozen, Operator, Hooked, Counting,
    )
}  # fmt: skip


class Model(nn.Module):
    """A model with two copies of a part among layers that a graph can hold."""

    def __init__(self, part: Callable[[], nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList([part(), nn.Linear(D, D), part()])
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(D, V)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = self.drop(layer(x))
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch(seed: int, rows: int = 3, length: int = 5) -> dict[str, Any]:
    ids = torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids.roll(1, -1)}
