"""Queries that an added mask of -infinity hides from every key: 0, as in torch, and no gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onward
from onward import OnwardError


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


# ---- masks that a model computes: where one hides every key by the least float, torch's sdpa has a
# gradient that is not that of its loss, and the batch is refused; any other trains as in eager


def _least(keep: torch.Tensor) -> torch.Tensor:
    return torch.zeros(()).masked_fill(~keep, torch.finfo(torch.float32).min)


def _triangle(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of the ids, where 0 is padding
    "keys": lambda i: _least((i != 0)[:, None, None, :]),
    "keys and queries": lambda i: _least(
        (i != 0)[:, None, None, :] & (i != 0)[:, None, :, None]
    ),
    "of one kind": lambda i: _least((i != 0)[:, None, None, :] == (i != 0)[:, None, :, None]),
    "causal keys": lambda i: _least((i != 0)[:, None, None, :] & _triangle(i.shape[1])),
    "by a product": lambda i: (
        (1.0 - (i.ne(0).float()[:, :, None] * i.ne(0).float()[:, None, :]))[:, None]
        * torch.finfo(torch.float32).min
    ),
    "by where": lambda i: torch.where(
        (torch.arange(i.shape[1]) < (i != 0).sum(1)[:, None])[:, None, None, :], 0.0,
        torch.finfo(torch.float32).min,
    ),
}  # fmt: skip
HIDING = {  # which of the batches below hide every key from some query
    "keys": {"nothing real"},
    "keys and queries": {"right", "left", "nothing real"},
    "of one kind": set[str](),
    "causal keys": {"left", "nothing real"},
    "by a product": {"right", "left", "nothing real"},
    "by where": {"nothing real"},
}
IDS = {
    "full": [[3, 1, 2, 5], [1, 1, 4, 2], [5, 2, 3, 1]],
    "right": [[3, 1, 2, 5], [1, 1, 0, 0], [5, 2, 3, 0]],
    "left": [[3, 1, 2, 5], [0, 0, 4, 2], [0, 2, 3, 1]],
    "nothing real": [[3, 1, 2, 5], [0, 0, 0, 0], [5, 2, 3, 1]],
}


class Computing(Attending):
    def __init__(self, mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(2)
        self.words, self.mask = nn.Embedding(6, 8), mask

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(self.words(ids), self.mask(ids))


COMPUTED_BY_SIZE = COMPUTED | {  # masks whose computation spells the sizes out
    "by a view": lambda i: _least((i != 0).view(i.shape[0], 1, 1, i.shape[1])),
    "by an expansion": lambda i: _least(
        (i != 0)[:, None, None].expand(i.shape[0], 1, i.shape[1], i.shape[1])
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COMPUTED_BY_SIZE)
def test_a_mask_of_another_size_is_looked_at_with_its_own_sizes(name: str) -> None:
    """Batches with a size of 1 have captures of their own, whose assumptions hold for no other
    batch."""
    torch.manual_seed(0)
    model = Computing(COMPUTED_BY_SIZE[name])
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0))
    for shape in ((1, 1), (4, 1), (1, 3), (4, 3), (2, 5), (1, 1)):
        ids = torch.ones(shape, dtype=torch.int64)
        torch.testing.assert_close(trainer.train_step(ids).loss, model(ids).detach())


class Unread(Computing):
    """A model that reads nothing of its attention's result but a size."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        h = self.words(ids)
        y = F.scaled_dot_product_attention(h, h, h, attn_mask=self.mask(ids)[:, 0])
        return h.square().mean() * y.shape[1]


@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_presumed_of_a_mask_that_nobody_reads(size: int) -> None:
    torch.manual_seed(0)
    model = Unread(COMPUTED["causal keys"])
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0))
    for tokens in (4, 2, 5):
        ids = torch.zeros(size, tokens, dtype=torch.int64)  # all of it hidden
        torch.testing.assert_close(trainer.train_step(ids).loss, model(ids).detach())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COMPUTED)
def test_a_mask_that_the_model_computes_trains_as_in_eager_or_is_refused(name: str) -> None:
    torch.manual_seed(0)
    model = Computing(COMPUTED[name])
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.5))
    for kind in (*IDS, "full"):
        twin, ids = copy.deepcopy(model), torch.tensor(IDS[kind])
        if kind in HIDING[name]:
            with pytest.raises(OnwardError, match="may hide every key"):
                trainer.train_step(ids)
            assert all(map(torch.equal, model.parameters(), twin.parameters()))
            continue
        want = twin(ids)
        want.backward()
        torch.testing.assert_close(trainer.train_step(ids).loss, want.detach())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert q.grad is not None
            torch.testing.assert_close(p, q - 0.5 * q.grad, rtol=1e-4, atol=1e-6)
