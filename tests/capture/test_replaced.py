"""A function of torch's that the user has replaced by one around it takes effect once, as in eager
PyTorch, in a trace and in the kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

import onward

X = torch.linspace(-1, 1, 24).view(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.table = nn.Linear(8, 8), nn.LayerNorm(8), nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x)) + self.table(torch.tensor([0, 3, 1]))
        h = F.softmax(F.gelu(h), -1) + F.normalize(h, dim=-1) + h.norm(dim=-1, keepdim=True)
        parts = torch.stack(h.split(4, dim=-1))
        return F.cross_entropy(parts.flatten(0, 1), torch.tensor([0, 1, 2, 3, 0, 1])) + F.mse_loss(
            h, x
        )


def doubled(plain: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        made = plain(*args, **kwargs)
        return tuple(2 * m for m in made) if isinstance(made, tuple) else 2 * made

    return called


def twice(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: plain(*args, **kwargs) + 3 * plain(*args, **kwargs)


REPLACED = [(F, "layer_norm"), (F, "embedding"), (F, "softmax"), (F, "normalize"), (F, "gelu"),
            (F, "linear"), (F, "cross_entropy"), (F, "mse_loss"), (torch.Tensor, "norm"),
            (torch.Tensor, "split")]  # fmt: skip


@pytest.mark.parametrize("way", [doubled, twice])
@pytest.mark.parametrize(("owner", "name"), REPLACED, ids=lambda x: x if type(x) is str else "")
def test_a_replacement_takes_effect_once(
    owner: Any, name: str, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "split" and way is twice:
        pytest.skip("what it gives is a tuple")
    model = Net()
    twin = copy.deepcopy(model)
    monkeypatch.setattr(owner, name, way(getattr(owner, name)))
    want = twin(X)
    want.backward()
    onward.accelerate(model, strict=True)
    have = model(X)
    have.backward()
    torch.testing.assert_close(have, want)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_two_replacements_around_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = tiny.gpt2(dropout=0.0), tiny.batch()
    twin = copy.deepcopy(model)
    for _ in range(2):
        monkeypatch.setattr(F, "layer_norm", doubled(F.layer_norm))
    want = float(twin(**data).loss.detach())
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert float(trainer.train_step(data).loss) == pytest.approx(want, rel=1e-5)
