"""Ops that move, split and join elements."""

from __future__ import annotations

import math

import numpy as np

from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import (
    NodeCall,
    Results,
    decomposition,
    require_few,
)
from onward.graph.importer.size_conditions import is_never_negative
from onward.graph.ops.shape import TO_THE_END, reshaped
from onward.graph.types import DType, Size, product


@decomposition("Reshape")
def _reshape(c: NodeCall) -> Results:
    target = c.contents(1)
    if all(isinstance(n, int) for n in target):
        return c.b.node("Reshape", [c.x(), c.b.ints([int(n) for n in target])], c.given)  # type: ignore[arg-type]
    return c.b.reshape(c.x(), reshaped(c.type(), target, bool(c.attr("allowzero", 0))))


@decomposition("Flatten")
def _flatten(c: NodeCall) -> Results:
    axis, shape = int(c.attr("axis", 1)), c.shape()
    axis = axis + len(shape) if axis < 0 else axis
    return c.b.reshape(c.x(), (product(shape[:axis]), product(shape[axis:])))


@decomposition("Squeeze", "Unsqueeze")
def _squeeze(c: NodeCall) -> Results:
    if not c.present(1):
        return c.plain_node()
    axes = c.ints(1)
    for axis in axes if c.op_type == "Squeeze" else ():
        size = c.shape()[axis]
        if isinstance(size, int) and size != 1:
            raise ValueError(f"dim {axis} of {c.type()} is not 1, and cannot be dropped")
    return c.b.node(c.op_type, [c.x(), c.b.ints(axes)], {})


@decomposition("Tile")
def _tile(c: NodeCall) -> Results:
    """Tile: `[1,s,1,t]` expanded to `[m,s,n,t]`, with pairs of dims merged."""
    shape, times = c.shape(), c.ints(1)
    apart = tuple(n for size in shape for n in (1, size))
    wide = tuple(n for size, k in zip(shape, times, strict=True) for n in (k, size))
    y = c.b.expand(c.b.reshape(c.x(), apart), wide)
    return c.b.reshape(y, tuple(size * k for size, k in zip(shape, times, strict=True)))


@decomposition("Concat")
def _concat(c: NodeCall) -> Results:
    axis = c.axis()
    for other in (c.type(i) for i in range(1, len(c.inputs))):
        pairs = enumerate(zip(c.shape(), other.shape, strict=True))
        if any(type(a) is type(b) is int and a != b and d != axis for d, (a, b) in pairs):
            raise ValueError(f"{c.type()} and {other} differ in more than dim {axis}")
    parts = [c.x(i) for i in range(len(c.inputs)) if c.shape(i)[axis] != 0]
    if not parts:
        return c.x()
    return parts[0] if len(parts) == 1 else c.b.Concat(*parts, axis=axis)


@decomposition("Split")
def _split(c: NodeCall) -> Results:
    axis, b = c.axis(), c.b
    if c.present(1):
        sizes, whole = c.ints(1), c.shape()[axis]
        if isinstance(whole, int) and sum(sizes) != whole:
            raise ValueError(f"its parts {sizes} are not the {whole} of dim {axis} of {c.type()}")
    else:
        whole, parts = c.shape()[axis], int(c.attr("num_outputs") or c.outputs)
        if not isinstance(whole, int):
            raise ValueError(f"Split along the open size {whole} needs its sizes as an input")
        if parts != c.outputs:
            raise ValueError(f"num_outputs is {parts}, and the node has {c.outputs} outputs")
        require_few(parts)
        each = -(-whole // parts)
        sizes = [max(0, min(each, whole - i * each)) for i in range(parts)]
    made = b.Split(c.x(), b.ints(sizes), axis=axis)
    return [made] if len(sizes) == 1 else made


@decomposition("Slice")
def _slice(c: NodeCall) -> Results:
    """Slice: a window for step 1; a Gather of indices for other steps, also negative ones."""
    rank, b, y = c.rank(), c.b, c.x()
    starts, ends = c.contents(1), c.contents(2)
    axes = c.ints(3) if c.present(3) else list(range(len(starts)))
    steps = c.ints(4) if c.present(4) else [1] * len(axes)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis, size = axis % rank, type_of(y).shape[axis % rank]
        if step == 1 and not (
            isinstance(size, int) and isinstance(start, int) and isinstance(end, int)
        ):
            first, last = _place(start, size), _place(end, size)
            y = b.slice(y, axis, first, first if is_never_negative(first - last) else last)
            continue
        if not isinstance(size, int):
            raise ValueError(
                f"its step {step} over the open size {size} is not supported; "
                "fix: give the dim a fixed size"
            )
        places = range(size)[int(start) : int(end) : step]  # type: ignore[arg-type]
        if len(places) < 2 or places.step == 1:
            first = places[0] if places else 0
            y = b.slice(y, axis, first, first + len(places))
        else:
            require_few(len(places))
            y = b.Gather(y, b.ints(list(places)), axis=axis)
    return y if y is not c.x() else b.Identity(y)


def _place(n: Size, size: Size) -> Size:
    """Where a cut before element n of an open dim is, counted from the front. A number that no size
    reaches means one of the ends. Where sizes decide whether the cut is within the dim, it is taken
    to be (`size_conditions`)."""
    if isinstance(n, int) and abs(n) >= TO_THE_END:
        return size if n > 0 else 0
    if is_never_negative(-n - 1):
        return 0 if is_never_negative(-n - size) else size + n
    return size if is_never_negative(n - size) else n


@decomposition("Pad")
def _pad(c: NodeCall) -> Results:
    rank, mode = c.rank(), c.attr("mode", "constant")
    pads = c.contents(1)
    axes = [d % rank for d in c.ints(3)] if c.present(3) else list(range(rank))
    before: list[Size] = [0] * rank
    after: list[Size] = [0] * rank
    for i, axis in enumerate(axes):
        before[axis], after[axis] = pads[i], pads[i + len(axes)]
    if mode != "constant":
        return _pad_by_place(c, mode, before, after)
    y = c.x()
    for axis in range(rank):  # a negative pad crops
        low, high = before[axis], after[axis]
        cut_low = -low if isinstance(low, int) and low < 0 else 0
        cut_high = -high if isinstance(high, int) and high < 0 else 0
        size = type_of(y).shape[axis]
        if isinstance(size, int) and cut_low + cut_high > size:
            raise ValueError(f"it cuts {cut_low + cut_high} of the {size} elements of dim {axis}")
        if cut_low or cut_high:
            y = c.b.slice(y, axis, cut_low, size - cut_high)
            before[axis] = 0 if cut_low else low
            after[axis] = 0 if cut_high else high
    if not c.present(2) or not c.array(2).any():
        return c.b.Pad(y, c.b.sizes([*before, *after]), c.b.scalar(0, c.type().dtype))
    return c.b.Pad(y, c.b.sizes([*before, *after]), c.b.const(c.array(2).reshape(())))


def _pad_by_place(c: NodeCall, mode: str, before: list[Size], after: list[Size]) -> Value:
    """Pad with mode edge, reflect or wrap: gathers for each position of the result the element of x
    that the mode defines."""
    y = c.x()
    for axis, size in enumerate(c.sizes()):
        if before[axis] == 0 and after[axis] == 0:
            continue
        require_few(int(before[axis]) + size + int(after[axis]))  # type: ignore[arg-type]
        places = np.arange(-int(before[axis]), size + int(after[axis]))  # type: ignore[arg-type]
        match mode:
            case "edge":
                places = places.clip(0, size - 1)
            case "wrap":
                places = places % size
            case "reflect":
                period = max(2 * (size - 1), 1)
                places = (size - 1) - abs((places % period) - (size - 1))
            case other:
                raise ValueError(f"its mode {other} is not supported")
        y = c.b.Gather(y, places.astype(np.int64), axis=axis)
    return y


@decomposition("Trilu")
def _trilu(c: NodeCall) -> Results:
    k = np.array(c.ints(1)[0] if c.present(1) else 0, np.int64)
    return c.b.Trilu(c.x(), k, upper=int(c.attr("upper", 1)))


@decomposition("DepthToSpace")
def _depth_to_space(c: NodeCall) -> Results:
    (n, ch, h, w), s = c.shape(), int(c.attr("blocksize"))
    depth = int(ch) // (s * s)  # type: ignore[arg-type]
    if c.attr("mode", "DCR") == "DCR":
        y = c.b.transpose(c.b.reshape(c.x(), (n, s, s, depth, h, w)), [0, 3, 4, 1, 5, 2])
    else:
        y = c.b.transpose(c.b.reshape(c.x(), (n, depth, s, s, h, w)), [0, 1, 4, 2, 5, 3])
    return c.b.reshape(y, (n, depth, h * s, w * s))


@decomposition("SpaceToDepth")
def _space_to_depth(c: NodeCall) -> Results:
    (n, ch, h, w), s = c.sizes(), int(c.attr("blocksize"))
    y = c.b.reshape(c.x(), (n, ch, h // s, s, w // s, s))
    order = [0, 1, 3, 5, 2, 4] if c.attr("mode", "DCR") == "CRD" else [0, 3, 5, 1, 2, 4]
    y = c.b.transpose(y, order)
    return c.b.reshape(y, (n, ch * s * s, h // s, w // s))


@decomposition("ReverseSequence")
def _reverse_sequence(c: NodeCall) -> Results:
    """ReverseSequence: reverses the first `lens` steps of each sequence."""
    b, time, batch = c.b, int(c.attr("time_axis", 0)), int(c.attr("batch_axis", 1))
    sizes = c.sizes()
    shape = [1] * len(sizes)
    shape[batch] = sizes[batch]
    lens = b.reshape(b.cast(c.x(1), DType.INT64), tuple(shape))
    shape = [1] * len(sizes)
    shape[time] = sizes[time]
    require_few(sizes[time])
    place = b.const(np.arange(sizes[time], dtype=np.int64).reshape(shape))
    index = b.Where(b.Less(place, lens), b.Sub(b.Sub(lens, 1), place), place)
    return b.GatherElements(c.x(), b.expand(index, tuple(sizes)), axis=time)


@decomposition("Col2Im")
def _col2im(c: NodeCall) -> Results:
    """Col2Im: adds the elements of each column at the positions that they were taken from."""
    b, image, block = c.b, c.ints(1), c.ints(2)
    rank = len(image)
    strides = c.attr("strides") or [1] * rank
    dilations = c.attr("dilations") or [1] * rank
    pads = c.attr("pads") or [0] * 2 * rank
    padded = [image[i] + pads[i] + pads[i + rank] for i in range(rank)]
    count = [(padded[i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)]
    require_few(math.prod(max(n, 0) for n in (*block, *count)))
    index = np.zeros([1] * 2 * rank, np.int64)
    for i in range(rank):  # for each dim: one dim of the block, then one of positions
        place = np.arange(block[i])[:, None] * dilations[i] + np.arange(count[i]) * strides[i]
        shape = [1] * 2 * rank
        shape[i], shape[rank + i] = block[i], count[i]
        index = index * padded[i] + place.reshape(shape)
    n, columns = c.shape()[0], c.sizes()[1]
    channels, size = columns // int(np.prod(block)), int(np.prod(padded))
    x = b.reshape(c.x(), (n, channels, index.size))
    zeros = b.full(0, type_of(x).with_shape((n, channels, size)))
    places = b.expand(b.const(index.reshape(1, 1, -1)), type_of(x).shape)
    y = b.ScatterElements(zeros, places, x, axis=2, reduction="add")
    y = b.reshape(y, (n, channels, *padded))
    for i in range(rank):
        y = b.slice(y, 2 + i, pads[i], pads[i] + image[i])
    return y
