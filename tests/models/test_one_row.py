"""Batches of one sample or one token: their dims of size 1 hold rows as others do."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from row_programs import CLASSES, WORDS, wrong_numbers
from torch import Tensor, nn

AXES = [axes for n in (1, 2, 3) for axes in itertools.combinations(range(3), n)]
REDUCTIONS: dict[str, Callable[[Tensor, tuple[int, ...], bool], Tensor]] = {
    "mean": lambda h, axes, keep: h.mean(axes, keep),
    "sum": lambda h, axes, keep: h.sum(axes, keep),
    "amax": lambda h, axes, keep: h.amax(axes, keep),
    "logsumexp": lambda h, axes, keep: h.logsumexp(axes, keep),
    "norm": lambda h, axes, keep: torch.linalg.vector_norm(h, 2, axes, keep),
    "mean of squares, by hand": lambda h, axes, keep: h.square().sum(axes, keep) / 3,
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tokens": lambda h, y: F.cross_entropy(h.transpose(1, 2), y),
    "first token": lambda h, y: F.cross_entropy(h[:, 0], y[:, 0]),
    "rows": lambda h, y: F.cross_entropy(h.reshape(-1, CLASSES), y.reshape(-1)),
}


class Reduced(nn.Module):
    """Tokens, to which a reduction of them is added."""

    def __init__(self, reduction: str, axes: tuple[int, ...], keep: bool, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, CLASSES)
        self.reduction, self.axes, self.keep, self.loss = reduction, axes, keep, loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.words(ids)
        less = REDUCTIONS[self.reduction](h, self.axes, self.keep)
        for axis in () if self.keep else self.axes:
            less = less.unsqueeze(axis)
        h = less.expand_as(h) * 0.5 if self.keep else h * 0.3 + less
        return LOSSES[self.loss](h, labels)


def _data(shape: tuple[int, int]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "ids": torch.randint(0, WORDS, shape, generator=g),
        # some ignored, but for the first
        "labels": torch.randint(0, CLASSES, shape, generator=g)
        * (torch.arange(shape[0])[:, None] % 2 == 0)
        - 100 * (torch.arange(shape[0])[:, None] % 2),
    }


CASES = list(itertools.product(REDUCTIONS, AXES, (True, False), LOSSES, ((1, 1), (1, 4), (3, 1))))


@pytest.mark.sample(24)
@pytest.mark.parametrize(("reduction", "axes", "keep", "loss", "shape"), CASES)
def test_reductions_over_dims_of_one(
    reduction: str, axes: tuple[int, ...], keep: bool, loss: str, shape: tuple[int, int]
) -> None:
    wrong = wrong_numbers(Reduced(reduction, axes, keep, loss), [_data(shape)])
    assert not wrong, "\n".join(wrong)


def _attention(x: Tensor, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=causal)


Op = Callable[[Tensor], Tensor]  # of f32[B,T,D], which it returns, or something like it
OPS: dict[str, Op] = {
    **{f"softmax over {d}": lambda h, d=d: h.softmax(d) for d in range(3)},
    **{f"cumsum over {d}": lambda h, d=d: h.cumsum(d) for d in range(3)},
    **{f"roll over {d}": lambda h, d=d: h.roll(1, d) for d in range(3)},
    **{f"flip over {d}": lambda h, d=d: h.flip(d) for d in range(3)},
    **{f"max over {d}": lambda h, d=d: h - h.max(d, keepdim=True).values for d in range(3)},
    **{f"last of {d}": lambda h, d=d: h + h.select(d, -1).unsqueeze(d) for d in range(3)},
    **{f"first of {d}": lambda h, d=d: h * h.narrow(d, 0, 1) for d in range(3)},
    **{f"joined, {d}": lambda h, d=d: torch.cat([h, h * 2], d).chunk(2, d)[1] for d in range(3)},
    **{f"stacked, {d}": lambda h, d=d: torch.stack([h, h.tanh()], d).sum(d) for d in range(4)},
    **{f"dims {p}": lambda h, p=p: h.permute(p).tanh().permute(tuple(p.index(d) for d in range(3)))
       for p in itertools.permutations(range(3))},
    "flattened": lambda h: h.flatten(0, 1).tanh().view_as(h),
    "flattened behind": lambda h: h.flatten(1).tanh().view_as(h),
    "squeezed": lambda h: h.squeeze().tanh().reshape(h.shape),
    "more dims of 1": lambda h: h[:, None, :, None].sum((1, 3)),
    "norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "norm of rows and features": lambda h: F.layer_norm(h, h.shape[1:]),
    "rms norm": lambda h: F.rms_norm(h, h.shape[-1:]),
    "attention": lambda h: _attention(h[:, None])[:, 0],
    "causal": lambda h: _attention(h[:, None], causal=True)[:, 0],
    "attention between samples": lambda h: _attention(h.transpose(0, 1)).transpose(0, 1),
    "attention by hand": lambda h: (h @ h.mT).softmax(-1) @ h,
    "einsum": lambda h: torch.einsum("btd,bsd,bse->bte", h, h, h),
    "outer": lambda h: torch.einsum("bt,td->btd", h[..., 0], h[0]),
    "expanded": lambda h: h[:1, :1].expand_as(h) + h,
    "first rows to all": lambda h: h * h[:, :1].mean(0, keepdim=True),
    "mean of means": lambda h: h - h.mean(1, True).mean(0, True),
    "sorted": lambda h: h.sort(1).values,
    "convolution": lambda h: F.conv1d(
        h.mT, h.new_ones(CLASSES, 1, 3), padding=1, groups=CLASSES
    ).mT,
    "gather": lambda h: h.gather(1, h.detach().argsort(1)),
    "index of samples": lambda h: h[torch.zeros(h.shape[0], dtype=torch.long)],
}  # fmt: skip


class Between(nn.Module):
    """Tokens, an op, and a loss."""

    def __init__(self, op: str, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.op, self.loss = nn.Embedding(WORDS, CLASSES), op, loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(self.words(ids))
        return LOSSES[self.loss](OPS[self.op](h) + 0.1 * h, labels)


@pytest.mark.sample(12)
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 1)])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("op", OPS)
def test_ops_on_dims_of_one(op: str, loss: str, shape: tuple[int, int]) -> None:
    wrong = wrong_numbers(Between(op, loss), [_data(shape)])
    assert not wrong, "\n".join(wrong)
