"""Fourier transforms, as products with their matrices."""

from __future__ import annotations

import numpy as np

from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import (
    NodeCall,
    Results,
    decomposition,
    numeric,
    require_few,
)


def _transformed(c: NodeCall, x: Value, length: int, inverse: bool, onesided: bool) -> Value:
    """The Fourier transform of x f[*S,L,1 or 2] along L, cropped or zero-padded to `length`:
    f[*S,K,2]."""
    b, rank = c.b, type_of(x).rank
    have, parts = type_of(x).shape[-2:]
    if not isinstance(have, int):
        raise ValueError("its signal length is open; fix: give the dim a fixed size")
    if onesided and inverse:
        return _real_inverse(c, x, length)
    if have > length:
        x = b.slice(x, rank - 2, 0, length)
    used = min(have, length)
    count = length // 2 + 1 if onesided else length
    require_few(2 * used * count)
    angle = 2 * np.pi * np.outer(np.arange(used), np.arange(count)) / length
    sign, scale = (1.0, 1 / length) if inverse else (-1.0, 1.0)
    dtype = numeric(type_of(x).dtype)
    re, im = (np.cos(angle) * scale).astype(dtype), (sign * np.sin(angle) * scale).astype(dtype)
    real = b.squeeze(b.slice(x, rank - 1, 0, 1), [rank - 1])
    a, d = b_product(c, real, re), b_product(c, real, im)
    if parts == 2:
        other = b.squeeze(b.slice(x, rank - 1, 1, 2), [rank - 1])
        a = b.Sub(a, b_product(c, other, im))
        d = b.Add(d, b_product(c, other, re))
    return b.Concat(b.unsqueeze(a, [rank - 1]), b.unsqueeze(d, [rank - 1]), axis=rank - 1)


def _real_inverse(c: NodeCall, x: Value, length: int) -> Value:
    """The real signal of a one-sided transform: f[*S,length,1]."""
    b, rank = c.b, type_of(x).rank
    count = length // 2 + 1
    have = int(type_of(x).shape[-2])  # type: ignore[arg-type]
    x = b.slice(x, rank - 2, 0, count) if have > count else x
    used = min(have, count)
    require_few(2 * used * length)
    k = np.arange(used)
    twice = np.where((k == 0) | ((length % 2 == 0) & (k == length // 2)), 1.0, 2.0)[:, None]
    angle = 2 * np.pi * np.outer(k, np.arange(length)) / length
    dtype = numeric(type_of(x).dtype)
    real, other = (b.squeeze(b.slice(x, rank - 1, i, i + 1), [rank - 1]) for i in range(2))
    y = b.Sub(
        b_product(c, real, (twice * np.cos(angle) / length).astype(dtype)),
        b_product(c, other, (twice * np.sin(angle) / length).astype(dtype)),
    )
    return b.unsqueeze(y, [rank - 1])


def b_product(c: NodeCall, x: Value, matrix: np.ndarray) -> Value:
    if type_of(x).rank == 1:
        return c.b.squeeze(c.b.MatMul(c.b.unsqueeze(x, [0]), matrix), [0])
    return c.b.MatMul(x, matrix)


@decomposition("DFT")
def _dft(c: NodeCall) -> Results:
    b, rank = c.b, c.rank()
    axis = int(c.ints(2)[0]) if c.present(2) else int(c.attr("axis", -2))
    axis %= rank
    order = list(range(rank))
    order[axis], order[rank - 2] = rank - 2, axis
    x = b.transpose(c.x(), order)
    inverse, onesided = bool(c.attr("inverse", 0)), bool(c.attr("onesided", 0))
    have = int(type_of(x).shape[-2])  # type: ignore[arg-type]
    length = c.ints(1)[0] if c.present(1) else 2 * (have - 1) if inverse and onesided else have
    return b.transpose(_transformed(c, x, length, inverse, onesided), order)


@decomposition("STFT")
def _stft(c: NodeCall) -> Results:
    """STFT: frames, each multiplied by the window and transformed."""
    b, step = c.b, c.ints(1)[0]
    size = c.sizes()[1]
    length = c.ints(3)[0] if c.present(3) else c.sizes(2)[0]
    frames = (size - length) // step + 1
    require_few(frames * length)
    index = np.arange(frames)[:, None] * step + np.arange(length)[None]
    x = b.Gather(c.x(), index.astype(np.int64), axis=1)  # f[N,F,L,parts]
    if c.present(2):
        x = b.Mul(x, b.reshape(c.x(2), (length, 1)))
    return _transformed(c, x, length, False, bool(c.attr("onesided", 1)))
