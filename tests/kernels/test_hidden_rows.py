"""Queries that an added mask of -infinity hides from every key: 0, as in torch, and no gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onward


class Attending(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.qkv, self.heads = nn.Linear(8, 24), heads

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (y - 0.3).pow(2).mean() + self.qkv(x).pow(2).mean()


@pytest.mark.parametrize("disable", [(), ("flash_attention",)], ids=["flash", "whole"])
@pytest.mark.parametrize("native", ["", "0"], ids=["native", "aten"])
@pytest.mark.parametrize("keys", [5, 300], ids=["one block", "several blocks"])
def test_rows_of_nothing(keys: int, native: str, disable: tuple[str, ...], build: object) -> None:
    if native:
        build(native)  # type: ignore[operator]
    torch.manual_seed(0)
    model = Attending(2)
    mask = torch.zeros(2, 1, keys, keys)
    mask[0, :, 1] = -torch.inf  # a row of nothing
    mask[0, :, 2, : keys // 2] = -torch.inf
    mask[1, :, :, keys // 2 :] = -torch.inf
    mask[1, :, -1, :-1] = -torch.inf
    mask[1, :, 0] = -torch.inf
    x = torch.randn(2, keys, 8)
    twin = copy.deepcopy(model)
    want = twin(x, mask)
    want.backward()
    trainer = onward.Trainer(
        model, onward.optim.SGD(lr=1.0), options=onward.TrainerOptions(disable=disable)
    )
    step = trainer.train_step(x=x, mask=mask)
    torch.testing.assert_close(step.loss, want.detach())
    for name, p in model.named_parameters():
        before, grad = twin.get_parameter(name), twin.get_parameter(name).grad
        assert grad is not None
        torch.testing.assert_close(before.detach() - p.detach(), grad, rtol=1e-4, atol=1e-6)


def test_a_padding_mask_of_multihead_attention_may_hide_everything() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            y, _ = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)
            return (y - 1).pow(2).mean()

    torch.manual_seed(0)
    model, hidden = Padded().train(), torch.tensor([[True] * 3, [False, True, False]])
    x = torch.randn(2, 3, 4)
    want = model(x, hidden).detach()
    got = onward.Trainer(model, onward.optim.SGD()).train_step(x=x, hidden=hidden).loss
    torch.testing.assert_close(got, want)
