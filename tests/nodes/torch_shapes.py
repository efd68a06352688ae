"""Ops that move, choose and place elements in torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from nodes.torch_table import NoForm, T, ints, row


@row("Concat")
def _concat(a: Any, *xs: T) -> T:
    return torch.cat(xs, a.axis)


@row("Expand")
def _expand(a: Any, x: T, shape: T) -> T:
    return x.expand(torch.broadcast_shapes(x.shape, ints(shape)))


@row("Flatten")
def _flatten(a: Any, x: T) -> T:
    axis = a.axis % x.dim() if a.axis < 0 else a.axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@row("Reshape")
def _reshape(a: Any, x: T, shape: T) -> T:
    sizes = ints(shape)
    return x.reshape([x.shape[i] if n == 0 and not a.allowzero else n for i, n in enumerate(sizes)])


@row("Squeeze")
def _squeeze(a: Any, x: T, axes: T | None = None) -> T:
    return x.squeeze() if axes is None else x.squeeze(tuple(ints(axes)))


@row("Unsqueeze")
def _unsqueeze(a: Any, x: T, axes: T) -> T:
    dims = ints(axes)
    rank = x.dim() + len(dims)
    for d in sorted(d % rank for d in dims):
        x = x.unsqueeze(d)
    return x


@row("Tile")
def _tile(a: Any, x: T, repeats: T) -> T:
    return x.repeat(ints(repeats))


@row("Transpose")
def _transpose(a: Any, x: T) -> T:
    return x.permute(a.perm if a.perm is not None else list(range(x.dim()))[::-1])


@row("Trilu")
def _trilu(a: Any, x: T, k: T | None = None) -> T:
    return (torch.triu if a.upper else torch.tril)(x, 0 if k is None else int(k))


@row("Split")
def _split(a: Any, x: T, split: T | None = None) -> tuple[T, ...]:
    if split is not None:
        return torch.split(x, ints(split), a.axis)
    return torch.split(x, math.ceil(x.shape[a.axis] / a.outputs), a.axis)


@row("Slice")
def _slice(a: Any, x: T, starts: T, ends: T, axes: T | None = None, steps: T | None = None) -> T:
    first, last = ints(starts), ints(ends)
    dims = ints(axes) or list(range(len(first)))
    for d, low, high, step in zip(dims, first, last, ints(steps) or [1] * len(dims), strict=True):
        places = range(x.shape[d])[low:high:step]
        x = x.index_select(d, torch.tensor(places, dtype=torch.int64))
    return x


@row("Pad")
def _pad(a: Any, x: T, pads: T, fill: T | None = None, axes: T | None = None) -> T:
    given, dims = ints(pads), ints(axes) or list(range(x.dim()))
    both = [[0, 0] for _ in range(x.dim())]
    for i, d in enumerate(dims):
        both[d] = [given[i], given[i + len(dims)]]
    if a.mode == "constant":
        value = 0.0 if fill is None else float(fill)
        return F.pad(x, [n for pair in reversed(both) for n in pair], value=value)
    mode = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}[a.mode]
    for d, pair in enumerate(both):  # torch pads the last dims, those behind N and C
        if any(pair):
            y = x.movedim(d, -1)
            x = F.pad(y.reshape(1, -1, y.shape[-1]), pair, mode=mode)
            x = x.reshape(*y.shape[:-1], x.shape[-1]).movedim(-1, d)
    return x


@row("DepthToSpace")
def _depth_to_space(a: Any, x: T) -> T:
    n, _, h, w = x.shape
    if a.mode == "DCR":
        x = x.reshape(n, a.blocksize**2, -1, h, w).transpose(1, 2).reshape(n, -1, h, w)
    return F.pixel_shuffle(x, a.blocksize)


@row("SpaceToDepth")
def _space_to_depth(a: Any, x: T) -> T:
    y = F.pixel_unshuffle(x, a.blocksize)
    if a.mode == "CRD":
        return y
    n, _, h, w = y.shape
    return y.reshape(n, -1, a.blocksize**2, h, w).transpose(1, 2).reshape(n, -1, h, w)


@row("ReverseSequence")
def _reverse_sequence(a: Any, x: T, lengths: T) -> T:
    moved = x.movedim((a.batch_axis, a.time_axis), (0, 1))
    made = [torch.cat([s[:n].flip(0), s[n:]]) for s, n in zip(moved, lengths.tolist(), strict=True)]
    return torch.stack(made).movedim((0, 1), (a.batch_axis, a.time_axis))


@row("CenterCropPad")
def _center_crop_pad(a: Any, x: T, shape: T) -> T:
    for d, size in zip(a.axes or range(x.dim()), shape.tolist(), strict=True):
        more = size - x.shape[d]
        low = more // 2 if more > 0 else 0
        pads = [0, 0] * (x.dim() - 1 - d % x.dim()) + [low, max(more, 0) - low]
        x = F.pad(x, pads) if more > 0 else x.narrow(d, -more // 2, size)
    return x


@row("Col2Im")
def _col2im(a: Any, x: T, image: T, block: T) -> T:
    rank = len(image)
    pads = a.pads or [0] * 2 * rank
    if rank != 2 or pads[:rank] != pads[rank:]:
        raise NoForm("columns of other than two dims, or with pads that differ")
    return F.fold(x, ints(image), ints(block), a.dilations or 1, pads[:rank], a.strides or 1)  # type: ignore[arg-type]


# ---- by index


def _from_start(index: T, size: int) -> T:
    index = index.to(torch.int64)
    return torch.where(index < 0, index + size, index)


@row("Gather")
def _gather(a: Any, x: T, index: T) -> T:
    d = a.axis % x.dim()
    found = x.index_select(d, _from_start(index, x.shape[d]).reshape(-1))
    return found.reshape(*x.shape[:d], *index.shape, *x.shape[d + 1 :])


@row("ArrayFeatureExtractor")
def _array_feature_extractor(a: Any, x: T, index: T) -> T:
    x = x if x.dim() > 1 else x.unsqueeze(0)
    return x.index_select(x.dim() - 1, index.reshape(-1).to(torch.int64))


@row("GatherElements")
def _gather_elements(a: Any, x: T, index: T) -> T:
    return x.gather(a.axis, _from_start(index, x.shape[a.axis]))


@row("GatherND")
def _gather_nd(a: Any, x: T, index: T) -> T:
    if a.batch_dims:
        inner = a.batch_dims - 1
        made = []
        for one, at in zip(x, index, strict=True):
            made.append(_gather_nd(_Inner(inner), one, at))
        return torch.stack(made)
    return x[tuple(index.to(torch.int64).unbind(-1))]


class _Inner:
    def __init__(self, batch_dims: int) -> None:
        self.batch_dims = batch_dims


_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
_TIES = "of max and min: ties share evenly, the element that is there too"


@row("ScatterElements", kinks=_TIES)
def _scatter_elements(a: Any, x: T, index: T, updates: T) -> T:
    index = _from_start(index, x.shape[a.axis])
    if a.reduction == "none":
        return x.scatter(a.axis, index, updates)
    return x.scatter_reduce(a.axis, index, updates, _REDUCE[a.reduction])


@row("ScatterND", kinks=_TIES)
def _scatter_nd(a: Any, x: T, index: T, updates: T) -> T:
    at = tuple(_from_start(i, n) for i, n in zip(index.unbind(-1), x.shape, strict=False))
    if a.reduction in ("none", "add"):
        return x.index_put(at, updates, accumulate=a.reduction == "add")
    rest = math.prod(x.shape[len(at) :])
    number = torch.zeros_like(at[0])
    for i, n in zip(at, x.shape, strict=False):
        number = number * n + i
    wide = number.reshape(-1, 1).expand(-1, rest)
    flat = x.reshape(-1, rest)
    y = flat.scatter_reduce(0, wide, updates.reshape(-1, rest), _REDUCE[a.reduction])
    return y.reshape(x.shape)


@row("Compress")
def _compress(a: Any, x: T, condition: T) -> T:
    kept = condition.nonzero().reshape(-1)
    return x.reshape(-1)[kept] if a.axis is None else x.index_select(a.axis, kept)


@row("OneHot")
def _one_hot(a: Any, index: T, depth: T, values: T) -> T:
    hot = F.one_hot(index.to(torch.int64) % int(depth), int(depth)).movedim(-1, a.axis)
    return values[hot]


@row("TensorScatter")
def _tensor_scatter(a: Any, cache: T, update: T, first: T | None = None) -> T:
    moved, new = cache.movedim(a.axis, 1), update.movedim(a.axis, 1)
    starts = [0] * len(cache) if first is None else first.tolist()
    made = []
    for one, part, start in zip(moved, new, starts, strict=True):
        at = torch.arange(start, start + len(part))
        at = at % len(one) if a.mode == "circular" else at
        made.append(one.index_copy(0, at, part))
    return torch.stack(made).movedim(1, a.axis)
