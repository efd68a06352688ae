"""Poolings as people write them, for row demand: what each leaves of the rows, and what keeps them.

A pooling makes a vector `f[B,D]` for each sequence of the states `h f[B,T,D]` and the mask
`m i64[B,T]`; `Tower` is an encoder with one, and a loss of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, CLASSES, WORDS = 16, 2, 3, 50
NEVER, LEAST = float("-inf"), torch.finfo(torch.float32).min


class Tower(nn.Module):
    """One layer of an encoder, a pooling, and a classifier. drop: of every dropout site."""

    def __init__(self, pool: Callable[[Tower, Tensor, Tensor], Tensor], drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pool, self.drop = pool, nn.Dropout(drop)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.score, self.scores = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 4)
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.reader = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.joined, self.head = nn.Linear(3 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def states(self, ids: Tensor, keys: Tensor) -> Tensor:
        h = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        q, k, v = (
            x.view(*ids.shape, HEADS, -1).transpose(1, 2) for x in self.qkv(h).chunk(3, dim=-1)
        )
        p = self.drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, keys[:, None, None] != 0, dropout_p=p)
        h = self.norms[0](h + self.drop(self.out(mixed.transpose(1, 2).flatten(2))))
        return self.norms[1](h + self.drop(self.outer(F.gelu(self.inner(h)))))

    def vector(self, ids: Tensor, mask: Tensor, keys: Tensor | None = None) -> Tensor:
        return self.pool(self, self.states(ids, mask if keys is None else keys), mask)

    def forward(
        self, ids: Tensor, mask: Tensor, labels: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        return F.cross_entropy(self.head(self.vector(ids, mask, keys)), labels)


class TwoTowers(Tower):
    """One encoder for both sides. loss: a function of `a f[B,D]` and `b f[B,D]`."""

    def __init__(
        self,
        pool: Callable[[Tower, Tensor, Tensor], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(pool)
        self.loss = loss

    def forward(
        self, ids: Tensor, mask: Tensor, labels: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        return self.loss(self.vector(ids, mask), self.vector(ids.flip(1), mask.flip(1)))


# ---- weights of a softmax


def weights(t: Tower, h: Tensor, m: Tensor, fill: float = NEVER) -> Tensor:
    return torch.softmax(t.score(h).squeeze(-1).masked_fill(m == 0, fill), dim=-1)


def added(t: Tower, h: Tensor, m: Tensor, low: float) -> Tensor:
    return torch.softmax(t.score(h).squeeze(-1) + (1.0 - m.to(h.dtype)) * low, dim=-1)


def by_heads(t: Tower, h: Tensor, m: Tensor) -> Tensor:
    w = torch.softmax(t.scores(h).masked_fill((m == 0).unsqueeze(-1), NEVER), dim=1)
    return (w.transpose(1, 2) @ h).mean(1)


def divided(w: Tensor, h: Tensor) -> Tensor:
    return ((w / w.sum(1, keepdim=True)).unsqueeze(-1) * h).sum(1)


def dropped(t: Tower, h: Tensor, m: Tensor) -> Tensor:
    return (t.drop(weights(t, h, m)).unsqueeze(1) @ h).squeeze(1)


# ---- sentence-transformers' Pooling


def wide(h: Tensor, m: Tensor) -> Tensor:
    return m.unsqueeze(-1).expand(h.size()).to(h.dtype)


def largest(t: Tower, h: Tensor, m: Tensor) -> Tensor:
    h = h.clone()
    h[wide(h, m) == 0] = -1e9
    return torch.max(h, 1)[0]


def weighted_mean(t: Tower, h: Tensor, m: Tensor) -> Tensor:
    w = torch.arange(1, h.shape[1] + 1).unsqueeze(0).unsqueeze(-1).expand(h.size()).to(h.dtype)
    w = wide(h, m) * w
    return torch.sum(h * w, 1) / torch.clamp(w.sum(1), min=1e-9)


def last_token(t: Tower, h: Tensor, m: Tensor) -> Tensor:
    values, found = m.flip(1).max(1)
    found = torch.where(values == 0, h.shape[1] - 1, found)
    at = (h.shape[1] - found - 1).unsqueeze(-1).repeat(1, h.shape[-1]).unsqueeze(1)
    return torch.gather(h * wide(h, m), 1, at).squeeze(1)


# ---- sums by one-hot products, sequence-first, and others


def segments(t: Tower, h: Tensor, m: Tensor) -> Tensor:
    pairs = F.one_hot((m.cumsum(1) - 1).clamp(min=0) // 2, 8).to(h.dtype)
    return torch.bmm((pairs * m.unsqueeze(-1).to(h.dtype)).transpose(1, 2), h).mean(1)


def turned(t: Tower, h: Tensor, m: Tensor) -> Tensor:
    x, k = h.transpose(0, 1), m.T
    return (x * k.unsqueeze(-1)).sum(0) / k.sum(0)[:, None]


def turned_weights(t: Tower, h: Tensor, m: Tensor) -> Tensor:
    x = h.transpose(0, 1).contiguous()
    w = torch.softmax(t.score(x).squeeze(-1).masked_fill(m.T == 0, NEVER), 0)
    return (w.unsqueeze(-1) * x).sum(0)


def three(t: Tower, h: Tensor, m: Tensor) -> Tensor:
    mean = (h * m.unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True)
    most = h.masked_fill(m.unsqueeze(-1) == 0, -1e9).max(1)[0]
    return t.joined(torch.cat([h[:, 0], mean, most], -1))


def read(t: Tower, h: Tensor, m: Tensor) -> Tensor:
    q = t.query.expand(h.shape[0], -1, -1)
    return t.reader(q, h, h, key_padding_mask=m == 0, need_weights=False)[0].squeeze(1)


@dataclass(frozen=True)
class Pooling:
    """A pooling. make: a function of the tower, h and m. rows: which ones the last feed-forward
    layer computes. why: patterns of the reasons that keep rows; none where nothing does."""

    make: Callable[[Tower, Tensor, Tensor], Tensor]
    rows: str = "real"
    why: tuple[str, ...] = ()


SUMS = r"MatMul at \(top\): it sums over the rows"
POOLINGS: dict[str, Pooling] = {
    "weights @ h": Pooling(lambda t, h, m: (weights(t, h, m).unsqueeze(1) @ h).squeeze(1)),
    "bmm": Pooling(lambda t, h, m: torch.bmm(weights(t, h, m).unsqueeze(1), h).squeeze(1)),
    "einsum": Pooling(lambda t, h, m: torch.einsum("bt,btd->bd", weights(t, h, m), h)),
    "product, sum": Pooling(lambda t, h, m: (weights(t, h, m).unsqueeze(-1) * h).sum(1)),
    "h @ weights": Pooling(
        lambda t, h, m: (h.transpose(1, 2) @ weights(t, h, m).unsqueeze(-1)).squeeze(-1)
    ),
    "four weights": Pooling(by_heads),
    "weights dropped": Pooling(dropped),
    "filled with the least": Pooling(
        lambda t, h, m: (weights(t, h, m, LEAST).unsqueeze(1) @ h).squeeze(1)
    ),
    "least added": Pooling(lambda t, h, m: (added(t, h, m, LEAST).unsqueeze(1) @ h).squeeze(1)),
    "filled with -1e4": Pooling(
        lambda t, h, m: (weights(t, h, m, -1e4).unsqueeze(1) @ h).squeeze(1),
        "all", (SUMS + r"; the softmax at \(top\) hides rows by -10000, which a score may",),
    ),
    "-1e9 added": Pooling(
        lambda t, h, m: (added(t, h, m, -1e9).unsqueeze(1) @ h).squeeze(1),
        "all", (SUMS + "; the softmax .* -1e", r"Softmax at \(top\): it normalises"),
    ),
    "masked behind the softmax": Pooling(
        lambda t, h, m: divided(torch.softmax(t.score(h).squeeze(-1), 1) * m, h),
        "all", (r"Softmax at \(top\): it normalises over the batch",),
    ),
    "exp, masked": Pooling(
        lambda t, h, m: divided(torch.exp(torch.tanh(t.score(h).squeeze(-1))) * m, h)
    ),
    "gates": Pooling(lambda t, h, m: (torch.sigmoid(t.score(h)) * m.unsqueeze(-1) * h).sum(1)),
    "cls": Pooling(lambda t, h, m: h[:, 0], "first"),
    "mean": Pooling(lambda t, h, m: (h * wide(h, m)).sum(1) / wide(h, m).sum(1).clamp(min=1e-9)),
    "mean_sqrt_len": Pooling(
        lambda t, h, m: (h * wide(h, m)).sum(1) / torch.sqrt(wide(h, m).sum(1).clamp(min=1e-9))
    ),
    "max": Pooling(largest),
    "weightedmean": Pooling(weighted_mean),
    "lasttoken": Pooling(last_token),
    "filled, amax": Pooling(lambda t, h, m: h.masked_fill(~m.bool()[:, :, None], NEVER).amax(1)),
    "low numbers added, max": Pooling(
        lambda t, h, m: (h + (1 - m.unsqueeze(-1).to(h.dtype)) * -1e9).max(1)[0],
        "all", (r"GatherElements at \(top\): places are chosen by what is computed",),
    ),
    "einsum of the mask": Pooling(
        lambda t, h, m: torch.einsum("bt,btd->bd", m.to(h.dtype), h) / m.sum(1, keepdim=True)
    ),
    "mask over its sum @ h": Pooling(
        lambda t, h, m: ((m.to(h.dtype) / m.sum(1, keepdim=True)).unsqueeze(1) @ h).squeeze(1)
    ),
    "cls and mean": Pooling(
        lambda t, h, m: h[:, 0] + (h * m.unsqueeze(-1)).sum(1) / m.sum(1, keepdim=True)
    ),
    "cls, mean and max": Pooling(three),
    "the last by gather": Pooling(
        lambda t, h, m: h.gather(
            1, (m.sum(1) - 1)[:, None, None].expand(-1, 1, h.shape[-1])
        ).squeeze(1),
        "first",
    ),
    "the last by number": Pooling(
        lambda t, h, m: h[torch.arange(h.shape[0]), m.sum(1) - 1], "first"
    ),
    "the last by a one-hot product": Pooling(
        lambda t, h, m: torch.bmm(
            F.one_hot(m.sum(1) - 1, m.shape[1]).to(h.dtype).unsqueeze(1), h
        ).squeeze(1),
        "first",
    ),
    "index_select": Pooling(
        lambda t, h, m: h.index_select(1, torch.zeros(1, dtype=torch.long)).squeeze(1), "first"
    ),
    "segments": Pooling(segments),
    "logsumexp": Pooling(
        lambda t, h, m: torch.logsumexp(h.masked_fill(~m.bool().unsqueeze(-1), NEVER), 1)
    ),
    "sequence first, mean": Pooling(turned),
    "sequence first, weights": Pooling(turned_weights),
    "attention with a query": Pooling(read),
    "mean of all": Pooling(
        lambda t, h, m: h.mean(1), "all", (r"ReduceMean at \(top\): it sums over the rows",)
    ),
}  # fmt: skip


def clip(a: Tensor, b: Tensor) -> Tensor:
    logits, own = a @ b.T, torch.arange(a.shape[0])
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def in_batch(a: Tensor, b: Tensor) -> Tensor:
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T * 20
    return F.cross_entropy(logits, torch.arange(a.shape[0]))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "in-batch negatives": in_batch,
    "both ways": clip,
    "cosine": lambda a, b: (F.cosine_similarity(a, b) - 0.5).square().mean(),
    "triplets": lambda a, b: F.triplet_margin_loss(a, b, b.roll(1, 0)),
    "einsum": lambda a, b: F.cross_entropy(
        torch.einsum("id,jd->ij", a, b), torch.arange(a.shape[0])
    ),
}  # fmt: skip


def batch(lengths: tuple[int, ...] = (9, 4, 2, 6), longest: int = 9) -> dict[str, Any]:
    """Sequences of these lengths, padded at the right; ids, mask and a label for each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    labels = torch.randint(0, CLASSES, (len(lengths),), generator=generator)
    return {"ids": ids * mask, "mask": mask, "labels": labels}
