"""Ops that interpolate: Resize, by a matrix for each dim, and GridSample.

Sources: https://onnx.ai/onnx/operators/onnx__Resize.html; cubic convolution from R. Keys, "Cubic
convolution interpolation for digital image processing", 1981.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import (
    NodeCall,
    Results,
    decomposition,
    numeric,
    require_few,
)
from onward.graph.types import DType


@decomposition("Resize")
def _resize(c: NodeCall) -> Results:
    b, sizes, rank = c.b, c.sizes(), c.rank()
    axes = [int(a) % rank for a in c.attr("axes") or range(rank)]
    scales, outs = _targets(c, sizes, axes)
    roi = c.array(1) if c.present(1) and c.type(1).shape != (0,) else None
    y = c.x()
    precise = DType.DOUBLE if c.type().dtype == DType.DOUBLE else DType.FLOAT
    nearest = c.attr("mode", "nearest") == "nearest"
    outside = []
    for i, axis in enumerate(axes):
        ends = (0.0, 1.0) if roi is None else (float(roi[i]), float(roi[i + len(axes)]))
        if scales[i] == 1.0 and outs[i] == sizes[axis] and ends == (0.0, 1.0):
            continue
        at = _coordinates(c, sizes[axis], outs[i], scales[i], ends)
        beyond = (at < 0) | (at > sizes[axis] - 1)
        if (
            c.attr("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
            and beyond.any()
        ):
            outside.append((axis, beyond))
        if nearest:
            index = _nearest(at, c.attr("nearest_mode", "round_prefer_floor"), scales[i])
            y = b.Gather(y, index.clip(0, sizes[axis] - 1), axis=axis)
        else:
            matrix = _matrix(c, at, sizes[axis], scales[i]).astype(precise.numpy())
            y = _along(c, b.cast(y, precise), axis, matrix)
    for axis, beyond in outside:
        shape = [1] * rank
        shape[axis] = len(beyond)
        fill = np.array(c.attr("extrapolation_value", 0.0), numeric(type_of(y).dtype))
        y = b.Where(b.const(beyond.reshape(shape)), fill, y)
    return b.cast(y, c.type().dtype) if y is not c.x() else b.Identity(y)


def _targets(c: NodeCall, sizes: list[int], axes: list[int]) -> tuple[list[float], list[int]]:
    if c.present(2) and c.type(2).shape != (0,):
        scales = [float(s) for s in c.array(2)]
        return scales, [math.floor(sizes[a] * s) for a, s in zip(axes, scales, strict=True)]
    outs = c.ints(3)
    scales = [out / sizes[a] for a, out in zip(axes, outs, strict=True)]
    policy = c.attr("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        one = (min if policy == "not_larger" else max)(scales)
        return [one] * len(axes), [int(one * sizes[a] + 0.5) for a in axes]
    return scales, outs


def _coordinates(
    c: NodeCall, size: int, out: int, scale: float, roi: tuple[float, float]
) -> np.ndarray:
    """The source coordinate of each output element along a dim, f64[out]. Corners are those of the
    elements that there are, `out`, as in onnxruntime and PyTorch, where `scale * size` is not whole
    too."""
    require_few(out)
    x = np.arange(out, dtype=np.float64)
    match c.attr("coordinate_transformation_mode", "half_pixel"):
        case "align_corners":
            return np.zeros(out) if out == 1 else x * (size - 1) / (out - 1)
        case "asymmetric":
            return x / scale
        case "tf_crop_and_resize":
            start, end = roi
            if out == 1:
                return np.full(out, (start + end) * (size - 1) / 2)
            return start * (size - 1) + x * (end - start) * (size - 1) / (out - 1)
        case "pytorch_half_pixel" if out == 1:
            return np.zeros(out)
        case "half_pixel_symmetric":
            return size / 2 * (1 - out / (scale * size)) + (x + 0.5) / scale - 0.5
        case _:
            return (x + 0.5) / scale - 0.5


def _nearest(at: np.ndarray, mode: str, scale: float) -> np.ndarray:
    """The elements that coordinates f64[out] take, i64[out]; by_scale: as before opset 11."""
    match mode:
        case "by_scale":
            found = np.floor(at) if scale >= 1 else np.ceil(at)
        case "round_prefer_floor":
            found = np.ceil(at - 0.5)
        case "round_prefer_ceil":
            found = np.floor(at + 0.5)
        case "floor":
            found = np.floor(at)
        case _:
            found = np.ceil(at)
    return found.astype(np.int64)


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    x = abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _matrix(c: NodeCall, at: np.ndarray, size: int, scale: float) -> np.ndarray:
    """The matrix of a Resize along a dim, f64[out,size]: the weight of each input element in each
    output."""
    cubic = c.attr("mode") == "cubic"
    narrow = min(scale, 1.0) if c.attr("antialias", 0) else 1.0
    width = math.ceil((2 if cubic else 1) / narrow) + 1
    require_few(len(at) * max(size, width))
    matrix = np.zeros((len(at), size))
    for row, x in enumerate(at):
        near = np.arange(math.floor(x) - width, math.floor(x) + width + 2)
        reach = (near - x) * narrow
        if cubic:
            weights = _cubic(reach, float(c.attr("cubic_coeff_a", -0.75)))
        else:
            weights = np.clip(1 - abs(reach), 0.0, None)
        if c.attr("exclude_outside", 0):
            weights = np.where((near < 0) | (near >= size), 0.0, weights)
        if c.attr("antialias", 0) or c.attr("exclude_outside", 0):
            weights = weights / weights.sum()
        np.add.at(matrix[row], near.clip(0, size - 1), weights)
    return matrix


def _along(c: NodeCall, x: Value, axis: int, matrix: np.ndarray) -> Value:
    """Multiplies dim `axis` of x by a matrix f[out,size]."""
    b, rank = c.b, type_of(x).rank
    order = [d for d in range(rank) if d != axis] + [axis]
    y = b.transpose(x, order)
    *rest, size = type_of(y).shape
    flat = b.reshape(y, (math.prod(int(n) for n in rest), size))  # type: ignore[arg-type]
    z = b.reshape(b.MatMul(flat, np.ascontiguousarray(matrix.T)), (*rest, matrix.shape[0]))
    return b.transpose(z, [order.index(d) for d in range(rank)])


@decomposition("GridSample")
def _grid_sample(c: NodeCall) -> Results:
    """GridSample: reads x f[N,C,*S] at grid f[N,*O,rank], whose last dim lists coordinates in
    reverse order of S."""
    b = c.b
    n, channels, *sizes = c.sizes()
    outs, rank = c.sizes(1)[1:-1], len(sizes)
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(
        str(c.attr("mode", "linear")), str(c.attr("mode", "linear"))
    )
    count = math.prod(outs)
    grid = b.cast(b.reshape(c.x(1), (n, count, rank)), c.type().dtype)
    taps = [_taps(c, b.squeeze(b.slice(grid, 2, rank - 1 - i, rank - i), [2]), sizes[i], mode)
            for i in range(rank)]  # fmt: skip
    flat = b.reshape(c.x(), (n, channels, math.prod(sizes)))
    total: Any = None
    for chosen in itertools.product(*taps):
        index: Any = None
        weight: Any = None
        for (place, share), size in zip(chosen, sizes, strict=True):
            index = place if index is None else b.Add(b.Mul(index, np.array(size, np.int64)), place)
            if share is not None:
                weight = share if weight is None else b.Mul(weight, share)
        wide = b.expand(b.unsqueeze(index, [1]), (n, channels, count))
        part = b.GatherElements(flat, wide, axis=2)
        part = part if weight is None else b.Mul(part, b.unsqueeze(weight, [1]))
        total = part if total is None else b.Add(total, part)
    return b.reshape(total, (n, channels, *outs))


def _taps(c: NodeCall, u: Value, size: int, mode: str) -> list[tuple[Value, Value | None]]:
    """The elements i64[N,O] that coordinates u f[N,O] in -1..1 read, and their weights."""
    b, aligned = c.b, bool(c.attr("align_corners", 0))
    x = b.Add(u, 1.0)
    x = b.Mul(x, (size - 1) / 2) if aligned else b.Div(b.Sub(b.Mul(x, float(size)), 1.0), 2.0)
    if mode == "nearest":
        return [_inside(c, b.Round(x), size, aligned, None)]
    low = b.Floor(x)
    f = b.Sub(x, low)
    if mode == "linear":
        shares = {0: b.Sub(1.0, f), 1: f}
    elif mode == "cubic":
        shares = {d: _cubic_value(c, b.Abs(b.Sub(float(d), f)), d in (0, 1)) for d in (-1, 0, 1, 2)}
    else:
        raise ValueError(f"its mode {mode} is not supported")
    return [_inside(c, b.Add(low, float(d)), size, aligned, share) for d, share in shares.items()]


def _cubic_value(c: NodeCall, x: Value, near: bool) -> Value:
    b, a = c.b, -0.75
    if near:
        return b.Add(b.Mul(b.Mul(b.Sub(b.Mul(x, a + 2), a + 3), x), x), 1.0)
    return b.Sub(b.Mul(b.Add(b.Mul(b.Sub(b.Mul(x, a), 5 * a), x), 8 * a), x), 4 * a)


def _inside(
    c: NodeCall, x: Value, size: int, aligned: bool, share: Value | None
) -> tuple[Value, Value | None]:
    """Moves coordinates inside as the padding mode says; returns them and their weights, which are
    0 outside for padding by zeros."""
    b, padding = c.b, c.attr("padding_mode", "zeros")
    if padding == "reflection":
        low, high = (0.0, float(size - 1)) if aligned else (-0.5, size - 0.5)
        span = max(high - low, 1e-9)
        away = b.Sub(x, low)
        turns = b.Floor(b.Div(away, 2 * span))
        within = b.Sub(away, b.Mul(turns, 2 * span))  # 0 .. 2 span
        x = b.Add(b.Sub(span, b.Abs(b.Sub(within, span))), low)
        x = b.Round(x) if not aligned else x
    elif padding == "zeros":
        live = b.And(b.GreaterOrEqual(x, 0.0), b.LessOrEqual(x, float(size - 1)))
        bits = b.cast(live, type_of(x).dtype)
        share = bits if share is None else b.Mul(share, bits)
    x = b.Min(b.Max(x, 0.0), float(size - 1))
    return b.Cast(x, to=DType.INT64), share
