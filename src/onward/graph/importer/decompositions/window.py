"""Convolutions and pooling in forms without kernels: automatic or asymmetric pads, windows that
reach beyond the end, and pooling other than max."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class _Places:
    """The positions of a window in each dim, as numbers."""

    def __init__(self, c: NodeCall, kernel: Sequence[int]) -> None:
        rank, sizes = len(kernel), c.sizes()[2:]
        self.kernel, self.sizes = list(kernel), sizes
        self.strides = list(c.attr("strides") or [1] * rank)
        self.dilations = list(c.attr("dilations") or [1] * rank)
        self.reach = [d * (k - 1) + 1 for d, k in zip(self.dilations, kernel, strict=True)]
        pads = list(c.attr("pads") or [0] * 2 * rank)
        self.before, self.after = pads[:rank], pads[rank:]
        auto, ceil = c.attr("auto_pad", "NOTSET"), bool(c.attr("ceil_mode", 0))
        if auto.startswith("SAME"):
            for i, size in enumerate(sizes):
                count = -(-size // self.strides[i])
                need = max(0, (count - 1) * self.strides[i] + self.reach[i] - size)
                low = need // 2 if auto == "SAME_UPPER" else need - need // 2
                self.before[i], self.after[i] = low, need - low
        elif auto == "VALID":
            self.before, self.after = [0] * rank, [0] * rank
        self.counts: list[int] = []
        for i, size in enumerate(sizes):
            room = size + self.before[i] + self.after[i] - self.reach[i]
            count = (math.ceil if ceil else math.floor)(room / self.strides[i]) + 1
            if ceil and (count - 1) * self.strides[i] >= size + self.before[i]:
                count -= 1  # it would start after the end
            self.counts.append(count)
        for whole in (self.kernel, self.counts, sizes):
            require_few(math.prod(max(n, 1) for n in whole))

    def starts(self, i: int) -> np.ndarray:
        """The indices that each position of a window reads in dim `i`, i64[count,kernel]; some may
        be outside."""
        require_few(self.counts[i] * self.kernel[i])
        first = np.arange(self.counts[i])[:, None] * self.strides[i] - self.before[i]
        return first + np.arange(self.kernel[i])[None] * self.dilations[i]

    def windows(self, c: NodeCall, x: Value, fill: float) -> Value:
        """The elements that each window reads, f[N,C,*O,K]; `fill` outside of x."""
        b, rank = c.b, len(self.kernel)
        low, high = [], []
        for i, size in enumerate(self.sizes):
            at = self.starts(i)
            low.append(max(0, -int(at.min(initial=0))))
            high.append(max(0, int(at.max(initial=0)) - size + 1))
        if any(low) or any(high):
            fills = b.const(np.array(fill, numeric(type_of(x).dtype)))
            x = b.Pad(x, b.ints([0, 0, *low, 0, 0, *high]), fills)
        for i in range(rank):  # for each dim: the positions, then the kernel
            x = b.Gather(x, (self.starts(i) + low[i]).astype(np.int64), axis=2 + 2 * i)
        order = [0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2)]
        x = b.transpose(x, order)
        n, channels = type_of(x).shape[:2]
        return b.reshape(x, (n, channels, *self.counts, int(np.prod(self.kernel))))

    def inside(self) -> np.ndarray:
        """A mask of the window elements that lie in x, b[*O,K]."""
        return self._grid(lambda i, at: (at >= 0) & (at < self.sizes[i]), np.logical_and)

    def padded(self) -> np.ndarray:
        """A mask of the window elements that lie in x or its pads, b[*O,K]."""
        return self._grid(
            lambda i, at: (at >= -self.before[i]) & (at < self.sizes[i] + self.after[i]),
            np.logical_and,
        )

    def numbers(self) -> np.ndarray:
        """The flat index, within its plane, of each window element, i64[*O,K]."""
        scale = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        return self._grid(lambda i, at: at * scale[i], np.add)

    def _grid(self, each: Any, join: Any) -> np.ndarray:
        rank, total = len(self.kernel), None
        for i in range(rank):
            shape = [1] * 2 * rank
            shape[i], shape[rank + i] = self.counts[i], self.kernel[i]
            part = np.asarray(each(i, self.starts(i))).reshape(shape)
            total = part if total is None else join(total, part)
        assert total is not None
        return np.ascontiguousarray(total).reshape(*self.counts, -1)


@decomposition("AveragePool")
def _average(c: NodeCall) -> Results:
    places = _Places(c, c.attr("kernel_shape"))
    counted = places.padded() if c.attr("count_include_pad", 0) else places.inside()
    total = c.b.reduce_sum(places.windows(c, c.x(), 0.0), [2 + len(places.kernel)], keepdims=False)
    counts = counted.sum(-1).astype(numeric(c.type().dtype))
    return c.b.Div(total, c.b.const(counts))


@decomposition("LpPool")
def _lp_pool(c: NodeCall) -> Results:
    places, p = _Places(c, c.attr("kernel_shape")), float(c.attr("p", 2))
    return _lp(c, places.windows(c, c.x(), 0.0), [2 + len(places.kernel)], p, False)


def _lp(c: NodeCall, x: Value, dims: list[int], p: float, keep: bool) -> Value:
    b, dtype = c.b, type_of(x).dtype
    if p == 2.0:
        return b.ReduceL2(x, b.ints(dims), keepdims=int(keep))
    total = b.reduce_sum(b.Pow(b.Abs(x), b.scalar(p, dtype)), dims, keepdims=keep)
    return b.Pow(total, b.scalar(1 / p, dtype))


@decomposition("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global(c: NodeCall) -> Results:
    dims = list(range(2, c.rank()))
    if not dims:  # an empty list of axes means all
        raise ValueError(f"{c.type()} has no dims to pool over")
    match c.op_type:
        case "GlobalAveragePool":
            return c.b.ReduceMean(c.x(), c.b.ints(dims), keepdims=1)
        case "GlobalMaxPool":
            return c.b.ReduceMax(c.x(), c.b.ints(dims), keepdims=1)
        case _:
            return _lp(c, c.x(), dims, float(c.attr("p", 2)), True)


@decomposition("MaxPool")
def _max_pool(c: NodeCall) -> Results:
    """MaxPool, as a node if its kernel takes it, else by the flat index of each window's
    maximum."""
    b, places = c.b, _Places(c, c.attr("kernel_shape"))
    rank = len(places.kernel)
    half = all(
        before == after and 2 * before <= reach
        for before, after, reach in zip(places.before, places.after, places.reach, strict=True)
    )
    floor = not c.attr("ceil_mode", 0) and not c.attr("storage_order", 0)
    if c.type().is_floating and half and floor and rank <= 3:
        window = {
            "kernel_shape": places.kernel,
            "strides": places.strides,
            "dilations": places.dilations,
            "pads": [*places.before, *places.after],
        }
        return list(b.MaxPool(c.x(), **window))[: c.outputs]
    low = -np.inf if c.type().is_floating else np.iinfo(numeric(c.type().dtype)).min
    x = places.windows(c, c.x(), low)
    best = b.ArgMax(x, axis=2 + rank, keepdims=1)
    y = b.squeeze(b.GatherElements(x, best, axis=2 + rank), [2 + rank])
    if c.outputs < 2:
        return y
    shape = type_of(x).shape
    numbers = b.expand(b.const(places.numbers()), shape)
    index = b.squeeze(b.GatherElements(numbers, best, axis=2 + rank), [2 + rank])
    if c.attr("storage_order", 0):
        index = _column_major(c, index, places.sizes)
    planes = np.arange(int(shape[0]) * int(shape[1])) * math.prod(places.sizes)  # type: ignore[arg-type]
    starts = planes.reshape(int(shape[0]), int(shape[1]), *[1] * rank).astype(np.int64)  # type: ignore[arg-type]
    return [y, b.Add(index, starts)]


def _column_major(c: NodeCall, index: Value, sizes: list[int]) -> Value:
    """Converts row-major flat indices in a plane to column-major ones."""
    b, total, left, scale = c.b, None, index, math.prod(sizes)
    step = 1
    for size in sizes:
        scale //= size
        here = b.Div(left, np.array(scale, np.int64))
        left = b.Sub(left, b.Mul(here, np.array(scale, np.int64)))
        part = b.Mul(here, np.array(step, np.int64))
        total = part if total is None else b.Add(total, part)
        step *= size
    assert total is not None
    return total


@decomposition("MaxUnpool")
def _max_unpool(c: NodeCall) -> Results:
    """MaxUnpool by flat indices into MaxPool's input; a larger result is zero-padded at the end."""
    b, kernel = c.b, c.attr("kernel_shape")
    rank = len(kernel)
    strides = c.attr("strides") or [1] * rank
    pads = c.attr("pads") or [0] * 2 * rank
    n, channels, *sizes = c.sizes()
    inferred = [
        (size - 1) * strides[i] - pads[i] - pads[i + rank] + kernel[i]
        for i, size in enumerate(sizes)
    ]
    shape = (n, channels, *inferred)
    count, whole = math.prod(c.sizes()), math.prod(shape)
    zeros = b.full(0, c.type().with_shape((whole,)))
    flat = b.ScatterElements(zeros, b.reshape(c.x(1), (count,)), b.reshape(c.x(), (count,)), axis=0)
    y = b.reshape(flat, shape)
    if c.present(2):
        more = [want - have for want, have in zip(c.ints(2), shape, strict=True)]
        y = b.Pad(y, b.ints([0] * len(shape) + more), b.scalar(0, c.type().dtype))
    return y


@decomposition("Conv")
def _conv(c: NodeCall) -> Results:
    places = _Places(c, c.sizes(1)[2:])
    x, pads = c.x(), [*places.before, *places.after]
    if places.before != places.after:
        rank = len(places.before)
        x = c.b.Pad(
            x, c.b.ints([0, 0, *places.before, 0, 0, *places.after]), c.b.scalar(0, c.type().dtype)
        )
        pads = [0] * 2 * rank
    rest = [c.x(i) for i in range(1, len(c.inputs))]
    return c.b.Conv(
        x, *rest, strides=places.strides, dilations=places.dilations, pads=pads,
        group=int(c.attr("group", 1)),
    )  # fmt: skip


@decomposition("ConvTranspose")
def _conv_transpose(c: NodeCall) -> Results:
    """ConvTranspose without pads, then cropped; positions beyond the last window hold the bias."""
    b, kernel, sizes = c.b, c.sizes(1)[2:], c.sizes()[2:]
    rank, group = len(kernel), int(c.attr("group", 1))
    strides = c.attr("strides") or [1] * rank
    dilations = c.attr("dilations") or [1] * rank
    more = c.attr("output_padding") or [0] * rank
    pads = list(c.attr("pads") or [0] * 2 * rank)
    whole = [strides[i] * (sizes[i] - 1) + dilations[i] * (kernel[i] - 1) + 1 for i in range(rank)]
    auto, wanted = c.attr("auto_pad", "NOTSET"), c.attr("output_shape")
    if wanted is None and auto.startswith("SAME"):
        wanted = [size * stride for size, stride in zip(sizes, strides, strict=True)]
    if wanted is not None:
        for i, want in enumerate(wanted[-rank:]):
            total = whole[i] + more[i] - want
            half = total // 2
            low = half if auto == "SAME_UPPER" else total - half
            pads[i], pads[rank + i] = low, total - low
    y = b.ConvTranspose(c.x(), c.x(1), strides=strides, dilations=dilations, group=group)
    ends = [whole[i] + more[i] - pads[rank + i] for i in range(rank)]
    beyond = [max(0, end - size) for end, size in zip(ends, whole, strict=True)]
    early = [max(0, -pads[i]) for i in range(rank)]
    if any(beyond) or any(early):
        y = b.Pad(y, b.ints([0, 0, *early, 0, 0, *beyond]), b.scalar(0, c.type().dtype))
    for i in range(rank):
        low, high = max(0, pads[i]), ends[i] + early[i]
        if low or high != type_of(y).shape[2 + i]:
            y = b.slice(y, 2 + i, low, high)
    if c.present(2):
        y = b.Add(y, b.reshape(c.x(2), (type_of(c.x(2)).shape[0], *[1] * rank)))
    return y


def as_index(b: Any, x: Value) -> Value:
    return b.cast(x, DType.INT64)
