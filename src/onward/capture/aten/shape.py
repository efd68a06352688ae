"""Operators that reshape, reorder, join, split or pad, and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Size, Type, broadcast, product


def _view(c: AtenCall, x: Value, *_: Any) -> Value:
    if "expand_as" in str(c.node.target):
        return c.b.expand(x, c.type.shape)
    return c.b.reshape(x, c.type.shape)


def _expand(c: AtenCall, x: Value, *_: Any, **__: Any) -> Value:
    return c.b.expand(x, c.type.shape)


def _repeat(c: AtenCall, x: Value, times: list[Any]) -> Value:
    """Expands each dim d as [times, d] from [1, d], and merges the two; new dims come first."""
    new = len(times) - type_of(x).rank
    apart: list[Size] = []
    wide: list[Size] = []
    for i, count in enumerate(times):
        size = type_of(x).shape[i - new] if i >= new else 1
        apart += [1, size]
        wide += [count, size]
    return c.b.reshape(c.b.expand(c.b.reshape(x, tuple(apart)), tuple(wide)), c.type.shape)


def _repeat_interleave(
    c: AtenCall, x: Value, times: Any, dim: int | None = None, **_: Any
) -> Value:
    if dim is None:
        x, dim = c.b.reshape(x, (product(type_of(x).shape),)), 0
    shape, dim = type_of(x).shape, dim % type_of(x).rank
    wide = (*shape[: dim + 1], times, *shape[dim + 1 :])
    return c.b.reshape(c.b.expand(c.b.unsqueeze(x, [dim + 1]), wide), c.type.shape)


def _broadcast_tensors(c: AtenCall, xs: Sequence[Value]) -> list[Value]:
    shape = broadcast(*[type_of(x).shape for x in xs])
    return [c.b.expand(x, shape) for x in xs]


def _transpose(c: AtenCall, x: Value, *dims: Any) -> Value:
    rank = type_of(x).rank
    perm = list(range(rank))
    name = c.node.target._schema.name.split("::")[1]
    if name == "transpose":
        i, j = (d % rank for d in dims)
        perm[i], perm[j] = perm[j], perm[i]
    elif name == "permute":
        perm = [d % rank for d in dims[0]]
    else:
        perm.reverse()
    return c.b.transpose(x, perm)


def _resize(c: AtenCall, x: Value, *_: Any) -> Value:
    return c.b.reshape(x, c.type.shape)


def _split(c: AtenCall, x: Value, *args: Any) -> list[Value]:
    name = c.node.target._schema.name.split("::")[1]
    rest = args if name == "unbind" else args[1:]
    dim = (rest[0] if rest else 0) % type_of(x).rank
    parts = [
        Type(type_of(x).dtype, tuple(c.t.size_of(s) for s in v.shape)) for v in c.node.meta["val"]
    ]
    sizes: list[Size] = [1 if name == "unbind" else p.shape[dim] for p in parts]
    pieces = [x] if len(sizes) == 1 else list(c.b.Split(x, c.b.sizes(sizes), axis=dim))
    return [c.b.squeeze(p, [dim]) for p in pieces] if name == "unbind" else pieces


def _cat(c: AtenCall, xs: Sequence[Value], dim: int = 0) -> Value:
    rank = c.type.rank
    parts = [x for x in xs if rank == 1 or type_of(x).shape != (0,)]  # torch skips f[0]
    return c.b.Concat(*[c.value(x, c.type.dtype) for x in parts], axis=dim % rank)


def _stack(c: AtenCall, xs: Sequence[Value], dim: int = 0) -> Value:
    dim = dim % (type_of(xs[0]).rank + 1)
    return c.b.Concat(*[c.b.unsqueeze(x, [dim]) for x in xs], axis=dim)


def _pad(c: AtenCall, x: Value, pads: list[int], *args: Any) -> Value:
    mode, fill = ("constant", None)
    for a in args:
        mode, fill = (a, fill) if isinstance(a, str) else (mode, a)
    if mode != "constant":
        return _pad_by_itself(c, x, pads, mode)
    rank = type_of(x).rank
    begin, end = [0] * rank, [0] * rank
    for i in range(len(pads) // 2):  # torch lists the last dim first
        begin[rank - 1 - i], end[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]
    for d, size in enumerate(type_of(x).shape):  # negative padding cuts off
        if min(begin[d], end[d]) < 0:
            x = c.b.slice(x, d, max(0, -begin[d]), size + min(0, end[d]))
    begin, end = [max(0, n) for n in begin], [max(0, n) for n in end]
    return c.b.Pad(x, c.b.ints(begin + end), c.value(fill or 0, type_of(x).dtype))


_MODES: dict[str, Any] = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}  # numpy's


def _pad_by_itself(c: AtenCall, x: Value, pads: list[int], mode: str) -> Value:
    """Pads with elements of x: reflected, replicated or circular."""
    for i in range(len(pads) // 2):
        dim, ends = type_of(x).rank - 1 - i, (pads[2 * i], pads[2 * i + 1])
        size = type_of(x).shape[dim]
        if not isinstance(size, int) or min(ends) < 0:
            raise CaptureError(
                f"padding mode {mode!r} with negative padding, or over a dim "
                "of open size, has no translation; fix: slice instead of "
                "negative padding, or pad with a constant"
            )
        if any(ends):
            numbers = np.pad(np.arange(size), ends, mode=_MODES[mode])
            x = c.b.Gather(x, c.b.const(numbers), axis=dim)
    return x


def padded_dims(x: Any, pads: list[int], mode: str = "constant", *_: Any) -> list[int]:
    """The dims whose sizes a padding needs as numbers."""
    dims = range(x.dim() - len(pads) // 2, x.dim())
    return list(dims) if mode != "constant" else []


def _roll(c: AtenCall, x: Value, shifts: Any, dims: Any = ()) -> Value:
    """Rolls along dims; without dims, the flattened elements."""
    shape = type_of(x).shape
    shifts, dims = (list(n) if isinstance(n, (list, tuple)) else [n] for n in (shifts, dims))
    y = x if dims else c.b.reshape(x, (product(shape),))
    for shift, dim in zip(shifts, dims or [0], strict=True):
        dim %= type_of(y).rank
        size = type_of(y).shape[dim]
        if not isinstance(size, int) or not isinstance(shift, int):
            back = c.b.Sub(c.b.arange(size), c.value(shift, DType.INT64))
            y = c.b.Gather(y, c.b.Mod(back, c.value(size, DType.INT64)), axis=dim)
            continue
        shift = shift % size if size else 0
        if shift == 0:
            continue
        parts = (c.b.slice(y, dim, size - shift, size), c.b.slice(y, dim, 0, size - shift))
        y = c.b.Concat(*parts, axis=dim)
    return c.b.reshape(y, shape)


def _flip(c: AtenCall, x: Value, dims: list[int]) -> Value:
    for dim in dims:
        dim %= type_of(x).rank
        size = type_of(x).shape[dim]
        last = c.b.reshape(c.b.size(size - 1), ())
        x = c.b.Gather(x, c.b.Sub(last, c.b.arange(size)), axis=dim)
    return x


def _pixel_shuffle(c: AtenCall, x: Value, factor: int) -> Value:
    """x f[*,C*r*r,H,W] -> f[*,C,H*r,W*r]."""
    *outer, _, h, w = type_of(x).shape
    apart = (*outer, c.type.shape[-3], factor, factor, h, w)
    n = len(outer)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return c.b.reshape(c.b.transpose(c.b.reshape(x, apart), order), c.type.shape)


def _pixel_unshuffle(c: AtenCall, x: Value, factor: int) -> Value:
    """x f[*,C,H*r,W*r] -> f[*,C*r*r,H,W]."""
    *outer, channels, _, _ = type_of(x).shape
    h, w = c.type.shape[-2:]
    apart = (*outer, channels, h, factor, w, factor)
    n = len(outer)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return c.b.reshape(c.b.transpose(c.b.reshape(x, apart), order), c.type.shape)


TABLE = table(
    {
        _view: "view.default reshape.default _unsafe_view.default flatten.using_ints "
        "unflatten.int expand_as.default view_as.default reshape_as.default",
        _expand: "expand.default broadcast_to.default",
        _repeat: "repeat.default",
        _repeat_interleave: "repeat_interleave.self_int",
        _broadcast_tensors: "broadcast_tensors.default",
        _transpose: "transpose.int permute.default t.default numpy_T.default",
        _resize: "unsqueeze.default squeeze.dim squeeze.dims squeeze.default",
        _split: "split.Tensor split_with_sizes.default chunk.default unbind.int",
        _roll: "roll.default",
        _flip: "flip.default",
        _pixel_shuffle: "pixel_shuffle.default",
        _pixel_unshuffle: "pixel_unshuffle.default",
        _cat: "cat.default concat.default",
        _stack: "stack.default",
        _pad: "pad.default constant_pad_nd.default",
    }
)
