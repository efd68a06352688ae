"""Ops of the ONNX standard that move, split and join elements without changing them."""

from __future__ import annotations

import math

from onward.graph.graph import content_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import axis_attribute, no_axes, standard
from onward.graph.types import DType, Shape, Size, Type, broadcast, divide, product


def _shape(call: Call) -> Type:
    shape = call.shape()
    known = shape[call.attrs.get("start", 0) : call.attrs.get("end", len(shape))]
    call.content = tuple(known)
    return Type(DType.INT64, (len(known),))


def reshaped(type: Type, shape: Shape, allowzero: bool) -> Shape:
    """The sizes of a tensor of this type after a Reshape to `shape`, in which 0 copies a dim and -1
    is what is left. Raises ValueError for sizes that do not divide, or that hold other numbers of
    elements."""
    have, target = type.shape, list(shape)
    if not allowzero:
        target = [have[i] if n == 0 and i < len(have) else n for i, n in enumerate(target)]
    if -1 in target:
        left, under = list(have), [n for n in target if n != -1]
        for n in list(under):  # common factors first, since only single terms can be divided by
            if n in left:
                left.remove(n)
                under.remove(n)
        rest = divide(product(left), product(under))
        if rest is None:
            raise ValueError(f"Reshape of {type} to {target}: sizes do not divide")
        target[target.index(-1)] = rest
    if product(have) != product(target):
        raise ValueError(f"Reshape of {type} to {target}: element counts differ")
    return tuple(target)


def _reshape(call: Call) -> Type:
    target = reshaped(call.type(), call.known(1), bool(call.attrs.get("allowzero", 0)))
    call.content = content_of(call.inputs[0]) if len(target) <= 1 else None
    return call.type().with_shape(target)


def _transpose(call: Call) -> Type:
    shape = call.shape()
    perm = call.attrs.get("perm") or list(reversed(range(len(shape))))
    return call.type().with_shape(shape[p] for p in perm)


def _unsqueeze(call: Call) -> Type:
    shape = list(call.shape())
    for d in sorted(call.dims(1, len(shape) + len(call.ints(1)))):
        shape.insert(d, 1)
    call.content = content_of(call.inputs[0]) if len(shape) <= 1 else None
    return call.type().with_shape(shape)


def _squeeze(call: Call) -> Type:
    shape = call.shape()
    drop = (
        call.dims(1, len(shape))
        if call.present(1)
        else [i for i, size in enumerate(shape) if size == 1]
    )
    call.content = content_of(call.inputs[0])
    return call.type().with_shape(s for i, s in enumerate(shape) if i not in drop)


def _expand(call: Call) -> Type:
    return call.type().with_shape(broadcast(call.shape(), call.known(1)))


def _concat(call: Call) -> Type:
    dim = call.attrs["axis"] % max(call.type().rank, 1)
    shape = list(call.shape())
    for i in range(1, len(call.inputs)):
        shape[dim] = shape[dim] + call.shape(i)[dim]
    contents = [content_of(v) for v in call.inputs]
    if len(shape) == 1 and all(c is not None for c in contents):
        call.content = tuple(n for c in contents if c is not None for n in c)
    return call.type().with_shape(shape)


def _split(call: Call) -> list[Type]:
    dim = call.attrs.get("axis", 0) % call.type().rank
    out: list[Type] = []
    for size in call.known(1):
        shape = list(call.shape())
        shape[dim] = size
        out.append(call.type().with_shape(shape))
    return out


TO_THE_END = 10**9


def clamp_slice(start: Size, end: Size, size: Size) -> tuple[Size, Size]:
    """Resolves `start:end` with step 1 on a dim as numpy does. A number that no size reaches, such
    as INT32_MAX or TensorFlow's 10^9, means to the end."""

    def place(n: Size, default: Size) -> Size:
        if isinstance(n, int):
            if n >= TO_THE_END:
                return default
            if n < 0:
                moved = size + n
                return max(moved, 0) if isinstance(moved, int) else moved
            return min(n, size) if isinstance(size, int) else n
        return size + n if all(factor < 0 for _, factor in n.terms) else n

    first, last = place(start, size), place(end, size)
    if isinstance(first, int) and isinstance(last, int):
        last = max(first, last)
    return first, last


def _slice(call: Call) -> Type:
    shape = list(call.shape())
    dims = call.dims(3, len(shape))
    steps = call.ints(4) if call.present(4) else [1] * len(dims)
    content = content_of(call.inputs[0])
    for start, end, dim, step in zip(call.known(1), call.known(2), dims, steps, strict=True):
        if step != 1:
            raise ValueError("Slice: only step 1 is supported")
        start, end = clamp_slice(start, end, shape[dim])
        shape[dim] = end - start
        if content is not None and isinstance(start, int) and isinstance(end, int):
            call.content = content[start:end]
    return call.type().with_shape(shape)


def _pad(call: Call) -> Type:
    pads, rank = call.known(1), call.type().rank
    return call.type().with_shape(
        pads[i] + pads[i + rank] + size for i, size in enumerate(call.shape())
    )


def _range(call: Call) -> Type:
    ends = [content_of(v) for v in call.inputs]
    if any(e is None for e in ends):
        raise ValueError("Range: its length depends on data")
    (start,), (end,), (step,) = (e for e in ends if e is not None)
    if step == 1:
        size = end - start
    elif isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        size = max(0, math.ceil((end - start) / step))
    else:
        raise ValueError("Range: a step other than 1 needs constant ends")
    return Type(call.type().dtype, (size,))


def _constant_of_shape(call: Call) -> Type:
    return Type(DType.FLOAT, call.known(0))


def _whole(call: Call) -> Type:
    return call.type()


OPS = (
    *standard(_shape, "Shape"),
    *standard(_reshape, "Reshape", view=True, reshapes=True),
    *standard(_transpose, "Transpose", view=True),
    *standard(_unsqueeze, "Unsqueeze", view=True, reshapes=True),
    *standard(_squeeze, "Squeeze", view=True, reshapes=True),
    *standard(_expand, "Expand", view=True, axes=no_axes),
    *standard(_concat, "Concat", axes=axis_attribute(0)),
    *standard(_split, "Split", view=True, axes=axis_attribute(0)),
    *standard(_slice, "Slice", view=True),
    *standard(_pad, "Pad"),
    *standard(_range, "Range"),
    *standard(_constant_of_shape, "ConstantOfShape"),
    *standard(_whole, "Trilu"),
)
