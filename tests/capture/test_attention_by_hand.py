"""Attention that a model writes out becomes one node, or says why not; the numbers are eager's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import tiny
import torch
import torch.nn.functional as F
from row_programs import wrong_numbers
from tiny_families import assert_same
from torch import Tensor, nn

from onward.capture import CaptureRequest, capture
from onward.rewrite.fuse_attention import fuse_attention

HEADS, WIDTH = 3, 4
INF, LEAST = float("inf"), torch.finfo(torch.float32).min
Body = Callable[["ByHand", Tensor, Tensor, Tensor, Tensor], Tensor]


class ByHand(nn.Module):
    """Heads f[B,H,T,K] of q, k, v and a mask b[B,T] of keys, to f[B,H,T,K]."""

    ahead: Tensor

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.packed = nn.Linear(6, 3 * HEADS * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, 6)
        self.drop = nn.Dropout(0.0)
        self.near = nn.Parameter(torch.randn(1, HEADS, 16, 16))
        self.register_buffer("ahead", torch.ones(16, 16).triu(1).bool())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.packed(x).unflatten(-1, (3, HEADS, WIDTH))
        q, k, v = (t.transpose(1, 2) for t in h.unbind(2))
        y = self.body(self, q, k, v, mask).transpose(1, 2).flatten(2)
        return (self.out(y).sin() * torch.arange(1, 7)).square().mean()


def attended(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ v


def plain(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(WIDTH)


def keys(mask: Tensor) -> Tensor:
    return mask[:, None, None, :]


def causal(m: ByHand, q: Tensor) -> Tensor:
    return m.ahead[: q.shape[2], : q.shape[2]]


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[2:])


def _bmm(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.bmm(_flat(q) * 0.5, _flat(k).transpose(1, 2))
    return torch.bmm(scores.softmax(-1), _flat(v)).view(q.shape)


def _bmm_between(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    b, h, t, _ = q.shape
    scores = torch.bmm(_flat(q) * 0.5, _flat(k).transpose(1, 2)).view(b, h, t, t)
    p = m.drop(F.softmax(scores.masked_fill(~keys(mask), LEAST), -1))
    return torch.bmm(p.view(b * h, t, t), _flat(v)).view(q.shape)


def _where_expanded(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = plain(q, k)
    return attended(torch.where(keys(mask), scores, torch.full_like(scores, -INF)), v)


def _tril(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = plain(q, k)
    return attended(scores.masked_fill(torch.ones_like(scores).tril() == 0, LEAST), v)


def _einsum(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.5
    scores = scores.masked_fill(~keys(mask), -torch.finfo(scores.dtype).max)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def _einsum_rows_first(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * 0.5
    scores = scores.masked_fill(causal(m, scores), -INF)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).transpose(1, 2)


def _baddbmm(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A bias for each head and sample under a view, as models with ALiBi have it."""
    b, h, t, _ = q.shape
    slopes = m.near[0, :, :1, :t].expand(b, h, 1, t).reshape(b * h, 1, t)
    scores = slopes.baddbmm(_flat(q), _flat(k).transpose(1, 2), beta=0.7, alpha=0.5)
    scores = scores.view(b, h, t, t) + (~keys(mask)).float() * LEAST
    p = m.drop(scores.softmax(-1))
    return torch.bmm(p.view(b * h, t, t), _flat(v)).view(q.shape)


def _one_head(rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]) -> Body:
    """Attention written for one head, on tensors of three dims, f[B,T,K]."""

    def body(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        y = rows(q[:, 0], k[:, 0], v[:, 0], mask[:, None], causal(m, q))
        return y.unsqueeze(1).expand(-1, HEADS, -1, -1)

    return body


def _capped_under_a_view(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    b, h, t, _ = q.shape
    scores = 2.0 * torch.tanh(torch.bmm(_flat(q), _flat(k).mT) / 2.0)
    return attended(scores.view(b, h, t, t).masked_fill(~keys(mask), -1e9), v)


def _in_place(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT
    scores /= 2.0
    scores[~keys(mask).expand_as(scores)] = LEAST
    return attended(scores, v)


# Every one is one Attention node.
FUSED: dict[str, Body] = {
    "a bias under a fill": lambda m, q, k, v, mask: attended(
        (plain(q, k) + m.near[..., : q.shape[2], : q.shape[2]]).masked_fill(~keys(mask), -1e9), v
    ),
    "a bias under -inf": lambda m, q, k, v, mask: attended(
        (plain(q, k) + m.near[..., : q.shape[2], : q.shape[2]]).masked_fill(
            causal(m, q), -torch.inf), v
    ),
    "divided": lambda m, q, k, v, mask: attended(plain(q, k), v),
    "multiplied": lambda m, q, k, v, mask: attended((q @ k.transpose(-2, -1)) * 0.3, v),
    "a scaled query": lambda m, q, k, v, mask: attended((q * 0.3) @ k.mT, v),
    "no scale": lambda m, q, k, v, mask: attended(q @ k.mT, v),
    "scaled twice": lambda m, q, k, v, mask: attended(2.0 * (q @ k.mT) / 3.0, v),
    "both scaled": lambda m, q, k, v, mask: attended((q * 0.7) @ (k * 0.7).mT, v),
    "a transposed key": lambda m, q, k, v, mask: attended(q @ k.permute(0, 1, 3, 2), v),
    "dropout": lambda m, q, k, v, mask: m.drop(plain(q, k).softmax(-1)) @ v,
    "keys, -inf": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(~keys(mask), -INF), v),
    "keys, least": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(~keys(mask), LEAST), v),
    "keys, -1e9": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(keys(mask) == 0, -1e9), v),
    "keys, -10000": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(~keys(mask), -10000.0), v),
    "keys, weakly": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(~keys(mask), -1.5), v),
    "keys, where": lambda m, q, k, v, mask: attended(
        torch.where(keys(mask), plain(q, k), torch.tensor(LEAST)), v),
    "keys, where, expanded": _where_expanded,
    "queries and keys": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(~(keys(mask) & mask[:, None, :, None]), LEAST), v),
    "causal, -inf": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(causal(m, q), -INF), v),
    "causal, least": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(causal(m, q), LEAST), v),
    "causal, tril": _tril,
    "causal, made": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -INF), v),
    "causal and keys": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(~keys(mask), LEAST).masked_fill(causal(m, q), LEAST), v),
    "scaled behind its mask": lambda m, q, k, v, mask: attended(
        (q @ k.mT).masked_fill(~keys(mask), -1e9) / 2.0, v),
    "added": lambda m, q, k, v, mask: attended(
        plain(q, k) + (~keys(mask)).float() * -10000.0, v),
    "added, least": lambda m, q, k, v, mask: attended(
        plain(q, k) + (1.0 - keys(mask).float()) * LEAST, v),
    "added before the scale": lambda m, q, k, v, mask: attended(
        (q @ k.mT + (~keys(mask)).float() * -10000.0) * 0.5, v),
    "a bias": lambda m, q, k, v, mask: attended(
        plain(q, k) + m.near[:, :, : q.shape[2], : q.shape[2]], v),
    "a bias before the scale": lambda m, q, k, v, mask: attended(
        (q @ k.mT + m.near[:, :, : q.shape[2], : q.shape[2]]) / 3.0, v),
    "a bias first": lambda m, q, k, v, mask: attended(
        m.near[:, :, : q.shape[2], : q.shape[2]] + plain(q, k), v),
    "a bias and a mask": lambda m, q, k, v, mask: attended(
        plain(q, k) + m.near[:, :, : q.shape[2], : q.shape[2]] + (~keys(mask)).float() * LEAST, v),
    "a bias, filled": lambda m, q, k, v, mask: attended(
        (plain(q, k) + m.near[..., : q.shape[2], : q.shape[2]]).masked_fill(causal(m, q), -INF), v),
    "filled, and a mask": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(causal(m, q), -INF) + (~keys(mask)).float() * -1e4, v),
    "capped": lambda m, q, k, v, mask: attended(2.0 * torch.tanh(plain(q, k) / 2.0), v),
    "capped, and a mask": lambda m, q, k, v, mask: attended(
        (torch.tanh(plain(q, k) / 0.5) * 0.5).masked_fill(~keys(mask), LEAST), v),
    "capped, and added": lambda m, q, k, v, mask: attended(
        torch.tanh(plain(q, k) / 0.5) * 0.5 + (~keys(mask)).float() * LEAST, v),
    "keys of all heads": lambda m, q, k, v, mask: attended(plain(q, k[:, :1]), v[:, :1]),
    "dropout module": lambda m, q, k, v, mask: F.dropout(
        plain(q, k).softmax(dim=-1), p=0.0, training=True) @ v,
    "subtracted": lambda m, q, k, v, mask: attended(
        plain(q, k) - 65000.0 * (~keys(mask)).float(), v),
    "a bias subtracted": lambda m, q, k, v, mask: attended(
        plain(q, k) - m.near[:, :, : q.shape[2], : q.shape[2]], v),
    "keys, of one head": _one_head(
        lambda q, k, v, mask, ahead: attended((q @ k.mT).masked_fill(~mask, -1e9), v)),
    "keys, added for one head": _one_head(
        lambda q, k, v, mask, ahead: attended(plain(q, k) + (~mask).float() * LEAST, v)),
    "keys and causal, of one capped head": _one_head(
        lambda q, k, v, mask, ahead: attended(
            (torch.tanh(plain(q, k)) * 3.0).masked_fill(ahead | ~mask, LEAST), v)),
    "causal, of one head": _one_head(
        lambda q, k, v, mask, ahead: attended(plain(q, k).masked_fill(ahead, -INF), v)),
    "keys, in place": _in_place,
    "keys, capped under a view": _capped_under_a_view,
    "scaled up behind least": lambda m, q, k, v, mask: attended(
        (q @ k.mT).masked_fill(~keys(mask), LEAST) * 2.0, v),
    "keys, of a high number": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(~keys(mask), 1e4), v),
    "other keys": lambda m, q, k, v, mask: attended(
        plain(q, k[:, :, :2]).masked_fill(~keys(mask[:, :2]), LEAST), v[:, :, :2]),
    "a mask that parameters decide": lambda m, q, k, v, mask: attended(
        plain(q, k).masked_fill(m.near[..., : q.shape[2], : q.shape[2]] > 1, -1e9), v),
    "detached keys": lambda m, q, k, v, mask: attended(plain(q, k.detach()), v),
    "values that are keys": lambda m, q, k, v, mask: attended(plain(q, k), k),
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "bmm, with views between": _bmm_between,
    "einsum": _einsum,
    "einsum, rows first": _einsum_rows_first,
}  # fmt: skip


def _read_twice(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    p = plain(q, k).softmax(-1)
    return p @ v + p.square().sum(-1, keepdim=True)


def _detached(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return plain(q, k).softmax(-1).detach() @ v


def _bias_before_a_view(m: ByHand, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A bias f[H,T,T] of heads, added to scores whose samples and heads become one dim."""
    b, h, t, _ = q.shape
    scores = plain(q, k) + m.near[0, :, :t, :t].expand(h, t, t)
    return attended(scores.reshape(b * h, t, t), v.reshape(b * h, t, -1)).view(b, h, t, -1)


# Forms that are not fused, each with the reason that is reported; an empty reason where the code
# does not look like attention.
LEFT: dict[str, tuple[Body, str]] = {
    "read twice": (_read_twice, "its probabilities are read by"),
    "detached": (_detached, ""),
    "a mask of the scores": (
        lambda m, q, k, v, mask: (lambda s: attended(torch.where(s > 0, s, -1e9), v))(plain(q, k)),
        "its scores are also read elsewhere",
    ),
    "without their highest": (
        lambda m, q, k, v, mask: (lambda s: attended(s - s.amax(-1, True), v))(plain(q, k)),
        "its scores are also read elsewhere",
    ),
    "over queries": (lambda m, q, k, v, mask: plain(q, k).softmax(-2) @ v, ""),
    "different fills": (
        lambda m, q, k, v, mask: attended(
            plain(q, k).masked_fill(~keys(mask), -1e4).masked_fill(causal(m, q), -1e9), v),
        "its masks fill scores with different numbers",
    ),
    "added to a fill": (
        lambda m, q, k, v, mask: attended(
            plain(q, k).masked_fill(causal(m, q), -1e9) + (~keys(mask)).float() * -1e9, v),
        "something is added to the scores after the mask has filled them",
    ),
    "one query head for all keys": (
        lambda m, q, k, v, mask: attended(plain(q[:, :1], k), v),
        "its products broadcast over samples or heads",
    ),
    "one query head, one value head": (
        lambda m, q, k, v, mask: attended(plain(q[:, :1], k), v[:, :1]),
        "its products broadcast over samples or heads",
    ),
    "a bias of heads before a view": (_bias_before_a_view, "a bias is added before a reshape"),
    "subtracted from": (
        lambda m, q, k, v, mask: attended((~keys(mask)).float() - plain(q, k), v), ""),
    "scaled below 0": (lambda m, q, k, v, mask: attended(-plain(q, k), v), ""),
    "no product": (lambda m, q, k, v, mask: attended(q.abs().sqrt() * k.abs(), v.mT), ""),
}  # fmt: skip


def _batch(size: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """A batch of sequences that end at different places."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (size,), generator=g)
    lengths[0] = length
    mask = torch.arange(length) < lengths[:, None]
    return {"x": torch.randn(size, length, 6, generator=g), "mask": mask}


def _ops(model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    graph = capture(CaptureRequest(model, (), batch)).graph
    fuse_attention(graph)
    graph.sweep()
    reasons = [str(n.meta["unfused"]) for n in graph if "unfused" in n.meta]
    return [n.op_type for n in graph], reasons


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FUSED)
def test_spellings_are_one_node(name: str) -> None:
    model, data = ByHand(FUSED[name]), [_batch(2, 5), _batch(3, 7, seed=1)]
    ops, _ = _ops(model, data[0])
    assert ops.count("Attention") == 1
    assert not {"Softmax", "MatMul", "Tanh", "Dropout"} & {*ops}
    assert_same([tiny.gradients(model, batch) for batch in data], model, data)


# Forms with a finite fill: where every key is hidden they attend to all keys alike, with -inf eager
# gives NaN.
HIDDEN = [
    name for name in FUSED
    if "keys" in name and "-inf" not in name and "expanded" not in name and "all" not in name
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", HIDDEN)
def test_where_all_keys_are_hidden(name: str) -> None:
    model, batch = ByHand(FUSED[name]), _batch(3, 5)
    batch["mask"][1] = False
    batch["mask"][2] = torch.tensor([False, True, False, True, False])
    assert_same([tiny.gradients(model, batch)], model, [batch])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LEFT)
def test_others_are_left(name: str) -> None:
    body, reason = LEFT[name]
    model, data = ByHand(body), [_batch(2, 5), _batch(3, 4, seed=1)]
    if name == "no product":
        data = [_batch(2, WIDTH), _batch(3, WIDTH, seed=1)]
    ops, reasons = _ops(model, data[0])
    assert "Attention" not in ops
    assert "Softmax" in ops
    assert [r[: len(reason)] for r in reasons] == ([reason] if reason else [])
    assert_same([tiny.gradients(model, batch) for batch in data], model, data)


class Tagged(ByHand):
    """The model with a label for some tokens, so that only their rows are read."""

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        h = self.packed(x.tanh()).unflatten(-1, (3, HEADS, WIDTH))
        q, k, v = (t.transpose(1, 2) for t in h.unbind(2))
        y = self.out(self.body(self, q, k, v, mask).transpose(1, 2).flatten(2))
        return F.cross_entropy(y.flatten(0, 1), labels.flatten())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [n for n in FUSED if "all heads" not in n])
def test_rows_that_are_read_are_computed(name: str) -> None:
    """The row of a hidden sequence may have a label too, unless the mask is -inf."""
    batch = _batch(4, 6) | {"labels": torch.full((4, 6), -100)}
    batch["labels"][:, 0] = torch.tensor([1, 2, 3, 0])
    batch["labels"][2, 0] = -100
    if name in HIDDEN:
        batch["mask"][1] = False
    wrong = wrong_numbers(Tagged(FUSED[name]), [batch])
    assert not wrong, "\n".join(wrong)
