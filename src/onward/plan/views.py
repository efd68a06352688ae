"""Views: values that are windows on another value's memory, described by strides.

Reshape, Transpose, Slice, Split, Squeeze, Unsqueeze and Expand need no launch where strides can
express them; a matrix product reads a transposed operand without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from onward.graph.graph import Node, attributes, content_of, type_of
from onward.graph.ops import named
from onward.graph.ops.shape import clamp_slice
from onward.graph.types import DType, Shape, Size, Type, divide, product, value

VIEWS = named("view")


@dataclass(frozen=True)
class Layout:
    """A strided window of a buffer: offset, shape and strides, in elements.

    Open sizes stay symbols: facts about a window hold for all their values.
    """

    buffer: int
    dtype: DType
    shape: Shape
    strides: Shape
    offset: Size = 0

    @property
    def is_contiguous(self) -> bool:
        return all(
            size == 1 or stride == want
            for size, stride, want in zip(self.shape, self.strides, dense(self.shape), strict=True)
        )

    @property
    def size(self) -> Size:
        """The size of the window in bytes, with open sizes as symbols."""
        return product(self.shape) * int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """The size in bytes at the sizes planned for."""
        return value(self.size)

    @property
    def is_static(self) -> bool:
        return all(isinstance(n, int) for n in (*self.shape, *self.strides, self.offset))


def dense(shape: Shape) -> Shape:
    """The row-major strides of a shape."""
    return tuple(product(shape[i + 1 :]) for i in range(len(shape)))


def contiguous(buffer: int, type: Type) -> Layout:
    return Layout(buffer, type.dtype, type.shape, dense(type.shape))


def view(node: Node, x: Layout) -> list[Layout] | None:
    """The layouts of a node's outputs as windows on its first input; None where a copy is
    needed."""
    out = [type_of(v).shape for v in node.outputs]
    match node.op_type:
        case "Identity":
            return [x]
        case "Reshape" | "Squeeze" | "Unsqueeze":
            strides = reshape_strides(x.shape, x.strides, out[0])
            return None if strides is None else [_at(x, out[0], strides, x.offset)]
        case "Transpose":
            perm = attributes(node).get("perm") or list(reversed(range(len(x.shape))))
            return [_at(x, out[0], tuple(x.strides[p] for p in perm), x.offset)]
        case "Expand":
            extra = len(out[0]) - len(x.shape)
            kept = tuple(
                0 if size == 1 and out[0][extra + i] != 1 else stride
                for i, (size, stride) in enumerate(zip(x.shape, x.strides, strict=True))
            )
            return [_at(x, out[0], (*[0] * extra, *kept), x.offset)]
        case "Slice":
            offset = x.offset
            starts, ends = content_of(node.inputs[1]), content_of(node.inputs[2])
            if starts is None or ends is None:
                return None  # which part is shown depends on the batch
            axes = content_of(node.inputs[3]) if len(node.inputs) > 3 else None
            dims = axes or tuple(range(len(starts)))
            for start, end, dim in zip(starts, ends, dims, strict=True):
                d = cast(int, dim) % len(x.shape)
                first, _ = clamp_slice(start, end, x.shape[d])
                offset = offset + first * x.strides[d]
            return [_at(x, out[0], x.strides, offset)]
        case "Split":
            dim = attributes(node).get("axis", 0) % len(x.shape)
            layouts: list[Layout] = []
            offset = x.offset
            for shape in out:
                layouts.append(_at(x, shape, x.strides, offset))
                offset = offset + shape[dim] * x.strides[dim]
            return layouts
        case _:
            return None


def _at(x: Layout, shape: Shape, strides: Shape, offset: Size) -> Layout:
    return Layout(x.buffer, x.dtype, shape, strides, offset)


def reshape_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides that make `new` a view of a strided `shape`; None where the elements must move."""
    if 0 in new or 0 in shape:
        return dense(new)
    # runs of old dims that act as one dim: (size, stride of the innermost)
    runs: list[tuple[Size, Size]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    out: list[Size] = []
    run = len(runs) - 1
    left, inner = runs[run] if runs else (1, 1)  # elements of the run not yet used
    for size in reversed(new):
        if size == 1:
            out.append(inner)
            continue
        if left == 1 and run > 0:
            run -= 1
            left, inner = runs[run]
        rest = divide(left, size)
        if rest is None:
            return None
        out.append(inner)
        inner = inner * size
        left = rest
    return tuple(reversed(out))
