"""Ops that mix rows along the token axis, in every layout of a model's states, for row demand.

A mixer takes `x` and the dim of its tokens, and returns something of the same shape. `mixing`
draws what stands around it: a mask before, a loss behind.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from row_programs import CLASSES, WIDTH, WORDS, Batch
from torch import Tensor, nn

SIZE, LENGTH = 4, 6
Mixer = Callable[["Mixed", Tensor, int, Tensor], Tensor]


class Mixed(nn.Module):
    """Tokens, a mixer in a layout, a head. places: the numbers of a batch, as the layout has x."""

    ahead: Tensor
    turned: Tensor

    def __init__(self, mixer: str, layout: str, mask: str, loss: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixer, self.layout, self.mask, self.loss = mixer, layout, mask, loss
        self.words = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.step, self.wide = nn.Linear(4, 4), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.filters = nn.Parameter(torch.randn(WIDTH, 1, 3))
        self.one = nn.Parameter(torch.randn(1, 1, 3))
        self.full = nn.Parameter(torch.randn(WIDTH, WIDTH, 3) / 4)
        self.among = nn.Parameter(torch.randn(LENGTH, LENGTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("ahead", torch.ones(LENGTH, LENGTH).triu(1).bool())
        self.register_buffer("turned", torch.tensor([3, 0, 5, 1, 4, 2]))

    def forward(self, **d: Tensor) -> Tensor:
        h = torch.tanh(self.inner[0](self.words(d["ids"])))
        h = BEFORE[self.mask](h, d["mask"].unsqueeze(-1))
        there, dim, back = LAYOUTS[self.layout]
        places = there(d["places"].unsqueeze(-1).expand(h.shape))
        x = there(h)
        y = MIXERS[self.mixer](self, x, dim, places)
        h = h + torch.tanh(self.inner[1](back(y.reshape(x.shape), h)))
        return LOSSES[self.loss](self, h, d)


# ---- layouts: there from f[B,T,D], the dim of tokens, and back


class _Layout(NamedTuple):
    there: Callable[[Tensor], Tensor]
    dim: int
    back: Callable[[Tensor, Tensor], Tensor]


def _turned(dim: int, *perm: int) -> _Layout:
    """A layout made by permuting f[B,T,D], with its token dim and the way back."""
    back = [perm.index(d) for d in range(3)]
    return _Layout(lambda h: h.permute(perm), dim, lambda y, h: y.permute(back))


def _heads(h: Tensor) -> Tensor:
    return h.view(*h.shape[:2], 2, -1)


LAYOUTS: dict[str, _Layout] = {
    "B,T,D": _turned(1, 0, 1, 2),
    "B,D,T": _turned(2, 0, 2, 1),
    "T,B,D": _turned(0, 1, 0, 2),
    "D,B,T": _turned(2, 2, 0, 1),
    "D,T,B": _turned(1, 2, 1, 0),
    "B,H,T,K": _Layout(
        lambda h: _heads(h).transpose(1, 2), 2, lambda y, h: y.transpose(1, 2).reshape(h.shape)
    ),
    "B*H,T,K": _Layout(
        lambda h: _heads(h).transpose(1, 2).flatten(0, 1), 1,
        lambda y, h: y.view(-1, 2, *y.shape[1:]).transpose(1, 2).reshape(h.shape),
    ),
    "T,B*H,K": _Layout(
        lambda h: _heads(h).permute(1, 0, 2, 3).flatten(1, 2), 0,
        lambda y, h: y.view(y.shape[0], -1, 2, y.shape[2]).transpose(0, 1).reshape(h.shape),
    ),
    "B,T,1,D": _Layout(lambda h: h.unsqueeze(2), 1, lambda y, h: y.squeeze(2)),
    "B,1,D,T": _Layout(
        lambda h: h.transpose(1, 2).unsqueeze(1), 3, lambda y, h: y.squeeze(1).transpose(1, 2)
    ),
    "1,B,T,D": _Layout(lambda h: h.unsqueeze(0), 2, lambda y, h: y.squeeze(0)),
}  # fmt: skip

BEFORE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda h, m: h,
    "product": lambda h, m: h * m,
    "filled": lambda h, m: h.masked_fill(m == 0, 0.0),
    "filled with -1": lambda h, m: h.masked_fill(m == 0, -1.0),
}


def _real_mean(p: Mixed, h: Tensor, d: Batch) -> Tensor:
    m = d["mask"].unsqueeze(-1)
    return F.cross_entropy(p.head((h * m).sum(1) / m.sum(1).clamp(min=1)), d["classes"])


LOSSES: dict[str, Callable[[Mixed, Tensor, Batch], Tensor]] = {
    "ignored": lambda p, h, d: F.cross_entropy(p.head(h).flatten(0, 1), d["labels"].flatten()),
    "mean of real": _real_mean,
    "the last": lambda p, h, d: F.cross_entropy(
        p.head(h[torch.arange(h.shape[0]), d["last"]]), d["classes"]
    ),
    "where": lambda p, h, d: torch.where(
        (d["labels"] != -100).unsqueeze(-1), p.head(h).square(), 0.0
    ).sum(),
}  # fmt: skip

# ---- mixers


def _last(made: Callable[[Tensor], Tensor]) -> Mixer:
    """A mixer made of a function that looks along the last dim."""
    return lambda p, x, dim, at: made(x.movedim(dim, -1)).movedim(-1, dim)


def _lines(made: Callable[[Mixed, Tensor], Tensor]) -> Mixer:
    """A mixer made of a function that looks along the last dim of f[N,1,T]."""

    def mix(p: Mixed, x: Tensor, dim: int, at: Tensor) -> Tensor:
        lines = x.movedim(dim, -1)
        made_of = made(p, lines.reshape(-1, 1, lines.shape[-1]))
        return made_of.reshape(lines.shape).movedim(-1, dim)

    return mix


def _channels(made: Callable[[Mixed, Tensor], Tensor]) -> Mixer:
    """A mixer made of a function of f[N,8,T], the model's own channels where the layout has
    them."""

    def mix(p: Mixed, x: Tensor, dim: int, at: Tensor) -> Tensor:
        lines = x.movedim(dim, -1)
        made_of = made(p, lines.reshape(-1, WIDTH, lines.shape[-1]))
        return made_of.reshape(lines.shape).movedim(-1, dim)

    return mix


def _pad(x: Tensor, dim: int, left: int, right: int, value: float = 0.0) -> Tensor:
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [left, right], value=value)


def _scan(p: Mixed, x: Tensor, dim: int, at: Tensor) -> Tensor:
    state, found = torch.zeros_like(x.select(dim, 0)), []
    for t in range(LENGTH):
        state = 0.5 * state + x.select(dim, t)
        found.append(state * x.select(dim, t))
    return torch.stack(found, dim)


def _scan_backwards(p: Mixed, x: Tensor, dim: int, at: Tensor) -> Tensor:
    state, found = torch.zeros_like(x.narrow(dim, 0, 1)), []
    for step in reversed(x.split(1, dim)):
        state = torch.sigmoid(step) * state + step
        found.insert(0, state)
    return torch.cat(found, dim)


def _selective(p: Mixed, x: Tensor, dim: int, at: Tensor) -> Tensor:
    """A selective state space as in Mamba: a state of its own for each of four numbers, read by a
    product."""
    x = x.movedim(dim, 1).reshape(-1, LENGTH, 4)
    reads, state, found = torch.tanh(p.step(x)), x.new_zeros(x.shape[0], 4, 4), []
    for t in range(LENGTH):
        state = 0.7 * state + x[:, t, :, None] * reads[:, t, None, :]
        found.append((state @ reads[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(found, 1)


def _selected(p: Mixed, x: Tensor, dim: int, at: Tensor) -> Tensor:
    lines = x.movedim(dim, -1)
    y = _selective(p, lines.reshape(-1, 4, LENGTH).transpose(1, 2), 1, at)
    return y.transpose(1, 2).reshape(lines.shape).movedim(-1, dim)


def _read(p: Mixed, x: Tensor, dim: int, at: Tensor) -> Tensor:
    """Attention written out, with a causal mask and none for keys."""
    rows = x.movedim(dim, -2)
    scores = (rows @ rows.transpose(-1, -2)).masked_fill(p.ahead, float("-inf"))
    return (scores.softmax(-1) @ rows).movedim(-2, dim)


def _scattered(p: Mixed, x: Tensor, dim: int, at: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(dim, x.argsort(dim), x)


def _at(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """The index, along a dim, repeated for every other index."""
    return index.view(*[-1 if d == dim else 1 for d in range(x.dim())]).expand(x.shape)


MIXERS: dict[str, Mixer] = {
    "roll by 1": lambda p, x, dim, at: x.roll(1, dim),
    "roll by -2": lambda p, x, dim, at: x.roll(-2, dim),
    "flip": lambda p, x, dim, at: x.flip(dim),
    "cumsum": lambda p, x, dim, at: x.cumsum(dim),
    "cumsum from the end": lambda p, x, dim, at: x.flip(dim).cumsum(dim).flip(dim),
    "cumprod": lambda p, x, dim, at: x.cumprod(dim),
    "cummax": lambda p, x, dim, at: x.cummax(dim).values,
    "logcumsumexp": lambda p, x, dim, at: x.logcumsumexp(dim),
    "padded at the left": lambda p, x, dim, at: _pad(x, dim, 1, 0).narrow(dim, 0, x.shape[dim]),
    "padded at the right": lambda p, x, dim, at: _pad(x, dim, 0, 1).narrow(dim, 1, x.shape[dim]),
    "moved by a pad": lambda p, x, dim, at: _pad(x, dim, -1, 1, 0.5),
    "padded with ones": lambda p, x, dim, at: _pad(x, dim, 2, -2, 1.0),
    "zeros, then the others": lambda p, x, dim, at: torch.cat(
        [torch.zeros_like(x.narrow(dim, 0, 1)), x.narrow(dim, 0, x.shape[dim] - 1)], dim
    ),
    "the last, then the others": lambda p, x, dim, at: torch.cat(
        [x.narrow(dim, -1, 1), x.narrow(dim, 0, x.shape[dim] - 1)], dim
    ),
    "pieces in another order": lambda p, x, dim, at: torch.cat(x.split(2, dim)[::-1], dim),
    "halves exchanged": lambda p, x, dim, at: torch.cat(x.chunk(2, dim)[::-1], dim),
    "one by one": lambda p, x, dim, at: torch.stack([*x.unbind(dim)[1:], x.select(dim, 0)], dim),
    "differences": lambda p, x, dim, at: x.diff(dim=dim, prepend=x.narrow(dim, 0, 1)),
    "every second": lambda p, x, dim, at: x.index_select(
        dim, torch.arange(0, LENGTH, 2)
    ).repeat_interleave(2, dim),
    "every second, sliced": lambda p, x, dim, at: torch.cat(
        [x[(slice(None),) * dim + (slice(k, None, 2),)] for k in (0, 1)], dim
    ),
    "gathered by numbers of the batch": lambda p, x, dim, at: x.gather(dim, at),
    "gathered by computed numbers": lambda p, x, dim, at: x.gather(dim, x.argsort(dim)),
    "gathered by a buffer": lambda p, x, dim, at: x.gather(dim, _at(x, dim, p.turned)),
    "take_along_dim": lambda p, x, dim, at: torch.take_along_dim(x, at, dim),
    "index_select": lambda p, x, dim, at: x.index_select(dim, p.turned),
    "sort": lambda p, x, dim, at: x.sort(dim).values,
    "sort, falling": lambda p, x, dim, at: x.sort(dim, descending=True).values,
    "topk": lambda p, x, dim, at: torch.cat([x.topk(3, dim).values, x.narrow(dim, 0, 3)], dim),
    "max": lambda p, x, dim, at: x - x.max(dim, keepdim=True).values,
    "argmax": lambda p, x, dim, at: x * (x.argmax(dim, keepdim=True) == 2),
    "amin": lambda p, x, dim, at: x - x.amin(dim, keepdim=True),
    "mean": lambda p, x, dim, at: x - x.mean(dim, keepdim=True),
    "sum": lambda p, x, dim, at: x * x.sum(dim, keepdim=True),
    "prod": lambda p, x, dim, at: x * x.prod(dim, keepdim=True),
    "norm": lambda p, x, dim, at: x / (1 + x.norm(dim=dim, keepdim=True)),
    "standardised": lambda p, x, dim, at: (
        (x - x.mean(dim, keepdim=True)) / (x.var(dim, keepdim=True) + 0.1).sqrt()
    ),
    "softmax": lambda p, x, dim, at: x.softmax(dim),
    "log_softmax": lambda p, x, dim, at: x.log_softmax(dim),
    "logsumexp": lambda p, x, dim, at: x - x.logsumexp(dim, keepdim=True),
    "layer_norm": _last(lambda x: F.layer_norm(x, (LENGTH,))),
    "scattered by computed numbers": _scattered,
    "scattered by a buffer": lambda p, x, dim, at: torch.zeros_like(x).scatter(
        dim, _at(x, dim, p.turned), x
    ),
    "scattered and added": lambda p, x, dim, at: x.scatter_add(dim, at, x),
    "index_add": lambda p, x, dim, at: x.index_add(dim, p.turned, x),
    "index_copy": lambda p, x, dim, at: x.index_copy(dim, p.turned[:3], x.narrow(dim, 2, 3)),
    "written in place": lambda p, x, dim, at: _written(x, dim),
    "conv1d of each channel": _lines(lambda p, x: F.conv1d(x, p.one, padding=1)),
    "conv1d, causal": _lines(lambda p, x: F.conv1d(x, p.one, padding=2)[..., :LENGTH]),
    "conv1d, dilated": _lines(lambda p, x: F.conv1d(x, p.one, padding=2, dilation=2)),
    "depthwise conv": _channels(lambda p, x: F.conv1d(x, p.filters, padding=1, groups=WIDTH)),
    "depthwise conv, causal": _channels(
        lambda p, x: F.conv1d(x, p.filters, padding=2, groups=WIDTH)[..., :LENGTH]
    ),
    "full conv": _channels(lambda p, x: F.conv1d(x, p.full, padding="same")),
    "strided conv": _channels(
        lambda p, x: F.conv1d(x, p.full, padding=1, stride=2).repeat_interleave(2, -1)
    ),
    "conv_transpose1d": _channels(lambda p, x: F.conv_transpose1d(x, p.full, padding=1)),
    "avg_pool1d": _lines(lambda p, x: F.avg_pool1d(x, 3, 1, 1)),
    "max_pool1d": _lines(lambda p, x: F.max_pool1d(x, 3, 1, 1)),
    "unfold": _last(lambda x: F.pad(x, [1, 1]).unfold(-1, 3, 1).mean(-1)),
    "a matrix of tokens": lambda p, x, dim, at: (x.movedim(dim, -1) @ p.among).movedim(-1, dim),
    "a triangle of tokens": _last(lambda x: x @ x.new_ones(LENGTH, LENGTH).triu()),
    "scan": _scan,
    "scan backwards": _scan_backwards,
    "selective scan": _selected,
    "windows": _last(lambda x: x.unflatten(-1, (2, 3)).flip(-1).flatten(-2)),
    "windows, normalised": _last(lambda x: x.unflatten(-1, (3, 2)).softmax(-1).flatten(-2)),
    "rows joined with features": lambda p, x, dim, at: p.wide(
        x.reshape(-1, 2 * WIDTH)
    ).reshape(x.shape),
    "another reading order": lambda p, x, dim, at: x.transpose(0, dim).reshape(x.shape),
    "all in one line": lambda p, x, dim, at: x.flatten().flip(0).view(x.shape),
    "the first given": lambda p, x, dim, at: x * x.narrow(dim, 0, 1).expand_as(x),
    "the last given": lambda p, x, dim, at: x * x.narrow(dim, x.shape[dim] - 1, 1),
    "tiled": lambda p, x, dim, at: torch.cat([x, x], dim).narrow(dim, 3, x.shape[dim]),
    "attention": _read,
}  # fmt: skip


def _written(x: Tensor, dim: int) -> Tensor:
    y, before = x.clone(), (slice(None),) * dim
    y[(*before, slice(1, 3))] = x[(*before, slice(3, 5))]
    return y


def mixing(mixer: str, layout: str) -> Mixed:
    """A model with this mixer and layout; a hash of their names picks the mask and the loss, so
    that all are met."""
    drawn = zlib.crc32(f"{mixer}, {layout}".encode())
    masks, losses = list(BEFORE), list(LOSSES)
    return Mixed(
        mixer, layout, masks[drawn % len(masks)], losses[drawn // len(masks) % len(losses)]
    )


def batch(seed: int, kind: str = "ragged") -> Batch:
    """Random data. kind: `ragged` or `holes`."""
    g = torch.Generator().manual_seed(seed)
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [4], [2], [5]])).long()
    if kind == "holes":
        mask = torch.randint(0, 2, (SIZE, LENGTH), generator=g)
        mask[:, 1] = 1
    tags = torch.randint(0, CLASSES, (SIZE, LENGTH), generator=g)
    labelled = (torch.rand((SIZE, LENGTH), generator=g) < 0.5) & (mask != 0)
    labelled[0, 1] = True
    return {
        "ids": torch.randint(0, WORDS, (SIZE, LENGTH), generator=g), "mask": mask,
        "labels": tags.masked_fill(~labelled, -100),
        "classes": torch.randint(0, CLASSES, (SIZE,), generator=g),
        "last": mask.cumsum(1).argmax(1),
        "places": torch.stack([torch.randperm(LENGTH, generator=g) for _ in range(SIZE)]),
    }  # fmt: skip
