"""Pooling, interpolation and `im2col`. Most work one dim at a time, by constants (weights, indices)
that depend on sizes alone; `NUMBERED` lists which sizes have to be numbers for that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.conv import batched, each
from onward.capture.aten.shape import padded_dims
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.ops.conv import ConvWindow
from onward.graph.types import DType, Size, divide, product


def _stem(c: AtenCall) -> str:
    return c.node.target._schema.name.split("::")[1]


def _dims(c: AtenCall) -> int:
    """Returns the number of dims in an op's name, the 2 of `avg_pool2d`."""
    return next(int(s) for s in _stem(c) if s.isdigit())


def _merged(c: AtenCall, x: Value, dims: int) -> Value:
    """Returns x f[*B,*S] as planes f[prod(B),1,*S], where S has `dims` dims."""
    shape = type_of(x).shape
    return c.b.reshape(x, (product(shape[:-dims]), 1, *shape[-dims:]))


def _means(c: AtenCall, x: Value, kernel: Sequence[int]) -> Value | None:
    """Returns means over windows that tile each of the last dims; None where they do not tile."""
    shape, apart, inner = type_of(x).shape, [], []
    outer = len(shape) - len(kernel)
    for i, size in enumerate(kernel):
        places = divide(shape[outer + i], size)
        if places is None:
            return None
        inner.append(outer + len(apart) + 1)
        apart += [places, size]
    y = c.b.reshape(x, (*shape[:outer], *apart))
    y = c.b.ReduceMean(y, c.b.ints(inner), keepdims=0)
    return c.b.reshape(y, (*shape[:outer], *apart[::2]))


def _avg_pool(
    c: AtenCall, x: Value, kernel: Any, stride: Any = None, padding: Any = 0, ceil: bool = False,
    count_padding: bool = True, divisor: int | None = None,
) -> Value:  # fmt: skip
    """Average pooling: means of a reshaped tensor if the windows tile, or else a convolution of
    each channel with a kernel of equal numbers."""
    if not type_of(x).is_floating:
        raise CaptureError(
            "avg_pool of integers has no translation; fix: convert the input to torch.float32"
        )
    dims = _dims(c)
    kernel, pads = each(kernel, dims), each(padding, dims)
    strides = each(stride, dims) if stride else kernel
    if ceil:  # a window larger than a padded dim is cut to it
        room = [n + 2 * p for n, p in zip(type_of(x).shape[-dims:], pads, strict=True)]
        whole = [isinstance(n, int) and n < k for n, k in zip(room, kernel, strict=True)]
        kernel = [n if w else k for n, k, w in zip(room, kernel, whole, strict=True)]
    if strides == kernel and not any(pads) and divisor is None:
        means = _means(c, x, kernel)
        if means is not None:
            return means
    dtype, count = type_of(x).dtype, int(np.prod(kernel)) if divisor is None else divisor
    attrs = {"strides": strides, "pads": pads * 2}
    window = ConvWindow(attrs, kernel)
    sizes = [window.places(n, i) for i, n in enumerate(type_of(x).shape[-dims:])]
    ends = [0] * dims
    if ceil and sizes != list(c.type.shape[-dims:]):  # the last window reaches past the end
        held, places = (c.t.as_numbers(t.shape[-dims:]) for t in (type_of(x), c.type))
        for i, (n, m) in enumerate(zip(held, places, strict=True)):
            ends[i] = max(0, (m - 1) * strides[i] + kernel[i] - n - 2 * pads[i])
        sizes = list(places)
    channels = type_of(x).shape[1] if type_of(x).rank == dims + 2 else 1
    channels = channels if isinstance(channels, int) else 1
    planes = _merged(c, x, dims) if channels == 1 else x
    if any(ends):
        planes = c.b.Pad(planes, c.b.ints([0] * (dims + 4) + ends), c.b.scalar(0.0, dtype))
    more = {"group": channels} if channels > 1 else {}
    one = np.ones((channels, 1, *kernel), dtype=dtype.numpy())
    if not any(ends) and (count_padding or divisor is not None or not any(pads)):
        y = c.b.Conv(planes, c.b.const(one / one.dtype.type(count)), **attrs, **more)
    else:
        whole = torch.ones(1, 1, *c.t.as_numbers(type_of(x).shape[-dims:]), dtype=torch.float64)
        weight = torch.ones(1, 1, *kernel, dtype=torch.float64)
        filled = F.pad(whole, [n for p, e in zip(pads[::-1], ends[::-1], strict=True)
                               for n in (p, p + e)])  # fmt: skip
        held = torch.convolution(filled, weight, None, strides, [0], [1] * dims, False, [0], 1)
        # torch's mean of ones is held / divisor, so that it gives the divisor of each window
        pooled = getattr(torch.ops.aten, _stem(c))
        means = pooled(whole, kernel, strides, pads, ceil,
                       count_padding, *[divisor][: dims - 1])  # fmt: skip
        y = c.b.Conv(planes, c.b.const(one), **attrs, **more)
        counts = (held.reshape(means.shape) / means).reshape(held.shape)
        y = c.b.Div(y, c.b.const(counts.numpy().astype(dtype.numpy())))
    return c.b.reshape(y, (*type_of(x).shape[:-dims], *sizes))


def _max_pool(
    c: AtenCall, x: Value, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil: bool = False,
) -> Value:  # fmt: skip
    return _largest(c, x, kernel, stride, padding, dilation, ceil, c.type.shape, False)[0]


def _max_pool_indexed(
    c: AtenCall, x: Value, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil: bool = False,
) -> list[Value]:  # fmt: skip
    """Max pooling, with the index of each maximum in its plane."""
    shape = tuple([c.t.size_of(s) for s in c.node.meta["val"][0].shape])
    return _largest(c, x, kernel, stride, padding, dilation, ceil, shape, True)


def _largest(
    c: AtenCall, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool,
    shape: Sequence[Size], indexed: bool,
) -> list[Value]:  # fmt: skip
    dims = _dims(c)
    kernel, pads = each(kernel, dims), each(padding, dims)
    attrs = {
        "kernel_shape": kernel, "strides": each(stride, dims) if stride else kernel,
        "pads": pads * 2, "dilations": each(dilation, dims),
    }  # fmt: skip
    window, planes = ConvWindow(attrs, kernel), batched(c, x, dims)
    if ceil:  # the last window may reach past the end: pad with the lowest number
        ends = [0] * dims
        for i, size in enumerate(type_of(x).shape[-dims:]):
            missing = window.covered(shape[i - dims], i) - size
            if not isinstance(missing, int):
                raise CaptureError(
                    "max_pool with ceil_mode=True over a dim of open size has "
                    "no translation; fix: ceil_mode=False, or pad the input"
                )
            ends[i] = max(0, missing)
        if any(ends):
            dtype = type_of(x).dtype
            least = c.b.scalar(-np.inf if type_of(x).is_floating else int(dtype.min), dtype)
            planes = c.b.Pad(planes, c.b.ints([0] * (dims + 4) + ends), least)
    y, place = c.b.MaxPool(planes, **attrs)
    y = c.b.reshape(y, tuple(shape))
    if not indexed:
        return [y]
    place = _in_plane(c, place, type_of(planes).shape[-dims:], type_of(x).shape[-dims:])
    return [y, c.b.reshape(place, tuple(shape))]


def _in_plane(c: AtenCall, place: Value, held: Sequence[Size], sizes: Sequence[Size]) -> Value:
    """Converts indices into all planes of sizes `held` to indices into one plane of sizes `sizes`,
    which is the first part of a held one."""
    place = c.b.Mod(place, c.b.size(product(held)))
    if tuple(held) == tuple(sizes):
        return place
    total = c.b.scalar(0, DType.INT64)
    for i in range(len(sizes)):
        step, inner = c.b.size(product(sizes[i + 1 :])), c.b.size(product(held[i + 1 :]))
        total = c.b.Add(total, c.b.Mul(c.b.Div(place, inner), step))
        place = c.b.Mod(place, inner)
    return total


def _adaptive_max_pool(c: AtenCall, x: Value, sizes: Any) -> list[Value]:
    """Output i of n is the maximum from `floor(i S / n)` to `ceil((i+1) S / n)`, the first of equal
    ones; with its index in its plane."""
    dims, shape = _dims(c), type_of(x).shape
    outer = len(shape) - dims
    made = tuple([c.t.size_of(s) for s in c.node.meta["val"][0].shape])
    flat = c.b.reshape(x, (*shape[:outer], product(shape[outer:])))
    places = c.t.as_numbers(made[outer:])
    if all(n == 1 for n in places):
        place = c.b.ArgMax(flat, axis=outer, keepdims=1)
    else:
        held = c.t.as_numbers(shape[outer:])
        if all(size % n == 0 for size, n in zip(held, places, strict=True)):
            kernel = [size // n for size, n in zip(held, places, strict=True)]
            return _largest(c, x, kernel, None, 0, 1, False, made, True)
        windows = c.b.const(_windows(held, places))  # i64[O,W]
        taken = c.b.Gather(flat, windows, axis=outer)
        best = c.b.ArgMax(taken, axis=outer + 1, keepdims=1)
        wide = c.b.expand(windows, type_of(taken).shape)
        place = c.b.squeeze(c.b.GatherElements(wide, best, axis=outer + 1), [outer + 1])
    y = c.b.GatherElements(flat, place, axis=outer)
    return [c.b.reshape(v, made) for v in (y, place)]


def _windows(sizes: Sequence[int], places: Sequence[int]) -> np.ndarray:
    """Returns the indices of the elements of each window of a plane, i64[O,W]; a window with fewer
    than W elements repeats its first."""
    each_dim = [
        [range(i * size // n, -(-(i + 1) * size // n)) for i in range(n)]
        for size, n in zip(sizes, places, strict=True)
    ]
    rows = []
    for window in itertools.product(*each_dim):
        rows.append([np.ravel_multi_index(at, sizes) for at in itertools.product(*window)])
    width = max(map(len, rows))
    return np.array([row + row[:1] * (width - len(row)) for row in rows], dtype=np.int64)


def _adaptive_avg_pool(c: AtenCall, x: Value, sizes: Any) -> Value:
    """Output i of n is the mean from `floor(i S / n)` to `ceil((i+1) S / n)`."""
    dims, shape = _dims(c), type_of(x).shape
    outer = len(shape) - dims
    places = c.t.as_numbers(c.type.shape[outer:])
    if all(n == 1 for n in places):
        return c.b.ReduceMean(x, c.b.ints(list(range(outer, len(shape)))), keepdims=1)
    kernel = [divide(size, n) for size, n in zip(shape[outer:], places, strict=True)]
    if all(isinstance(k, int) for k in kernel):
        means = _means(c, x, [k for k in kernel if isinstance(k, int)])
        if means is not None:
            return means
    for i, (size, n) in enumerate(zip(c.t.as_numbers(shape[outer:]), places, strict=True)):
        weights = np.zeros((n, size))
        for row in range(n):
            first, last = row * size // n, -(-(row + 1) * size // n)
            weights[row, first:last] = 1 / (last - first)
        x = _mixed(c, x, outer + i, weights)
    return x


def _mixed(c: AtenCall, x: Value, dim: int, weights: np.ndarray) -> Value:
    """Multiplies weights f[n,S] with dim `dim` of x, which has size S."""
    rank = type_of(x).rank
    matrix = c.b.const(np.ascontiguousarray(weights.astype(type_of(x).dtype.numpy())))
    if dim == rank - 2:
        return c.b.MatMul(matrix, x)
    order = [*(i for i in range(rank) if i != dim), dim]
    turned = c.b.const(np.ascontiguousarray(weights.T.astype(type_of(x).dtype.numpy())))
    y = c.b.MatMul(c.b.transpose(x, order), turned)
    return c.b.transpose(y, [order.index(i) for i in range(rank)])


def _upsample(c: AtenCall, x: Value, size: Any, *rest: Any) -> Value:
    """Interpolates each dim by the matrix that PyTorch's operator makes of the identity."""
    name, shape = _stem(c), type_of(x).shape
    align, scales = (None, rest[0]) if len(rest) == 1 else (rest[0], rest[1])
    if "_aa" in name and 1 in shape[2:]:
        raise CaptureError(
            "interpolate with antialias=True over images of one row or column "
            "has no translation; fix: antialias=False"
        )
    for dim in range(2, len(shape)):
        want, scale = c.type.shape[dim], None if scales is None else scales[dim - 2]
        factor = divide(want, shape[dim])
        if want == shape[dim] and scale in (None, 1.0):
            continue
        whole = scale is None or scale == factor
        if "nearest" in name and isinstance(factor, int) and whole:  # each element `factor` times
            have = type_of(x).shape
            y = c.b.expand(
                c.b.unsqueeze(x, [dim + 1]), (*have[: dim + 1], factor, *have[dim + 1 :])
            )
            x = c.b.reshape(y, (*have[:dim], want, *have[dim + 1 :]))
            continue
        (n, m) = c.t.as_numbers([shape[dim], want])
        columns = _columns(name, n, m, align, scale)
        if "nearest" in name:
            x = c.b.Gather(x, c.b.const(columns.argmax(1).astype(np.int64)), axis=dim)
        else:
            x = _mixed(c, x, dim, columns)
    return x


def _columns(name: str, n: int, m: int, align: Any, scale: Any) -> np.ndarray:
    """Returns the matrix f64[m,n] that interpolates a dim of size n to size m."""
    identity = torch.eye(n, dtype=torch.float64)
    more = [] if align is None else [align]
    wide = 2  # with antialiasing, torch's kernel confuses the dims of an image with one column
    if "bicubic" in name or "_aa" in name:
        op, sizes, factors = name, [m, wide], None if scale is None else [scale, 1.0]
        identity = identity[:, None, :, None].expand(n, 1, n, wide).contiguous()
    else:
        op = "upsample_linear1d" if "linear" in name else name.rstrip("123d") + "1d"
        sizes, factors, identity = [m], None if scale is None else [scale], identity[:, None, :]
    given = (None, factors) if factors is not None else (sizes, None)
    made: torch.Tensor = getattr(torch.ops.aten, op).vec(identity, given[0], *more, given[1])
    made = made[..., 0] if made.dim() == 4 else made
    return np.ascontiguousarray(made.reshape(n, m).numpy().T)


def _im2col(c: AtenCall, x: Value, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Value:
    """x f[N,C,H,W] -> f[N,C*K*L,P*Q]: the elements of a window K x L at each of P x Q places."""
    planes = batched(c, x, 2)
    pads = each(padding, 2)
    if any(pads):
        ends = [0, 0, *pads, 0, 0, *pads]
        planes = c.b.Pad(planes, c.b.ints(ends), c.b.scalar(0.0, type_of(x).dtype))
    window = ConvWindow(
        {"strides": each(stride, 2), "dilations": each(dilation, 2)}, each(kernel, 2)
    )
    sizes = c.t.as_numbers(type_of(planes).shape[2:])
    for i, size in enumerate(sizes):  # one after the other, each dim becomes two
        steps = np.arange(window.kernel[i]) * window.dilations[i]
        starts = np.arange(int(window.places(size, i))) * window.strides[i]  # type: ignore[arg-type]
        numbers = (steps[:, None] + starts).astype(np.int64)
        planes = c.b.Gather(planes, c.b.const(numbers), axis=2 + 2 * i)
    return c.b.reshape(c.b.transpose(planes, [0, 1, 2, 4, 3, 5]), c.type.shape)


TABLE = table(
    {
        _avg_pool: "avg_pool1d.default avg_pool2d.default avg_pool3d.default",
        _max_pool: "max_pool1d.default max_pool2d.default max_pool3d.default",
        _max_pool_indexed: "max_pool1d_with_indices.default max_pool2d_with_indices.default "
        "max_pool3d_with_indices.default",
        _adaptive_max_pool: "adaptive_max_pool1d.default adaptive_max_pool2d.default "
        "adaptive_max_pool3d.default",
        _adaptive_avg_pool: "adaptive_avg_pool1d.default adaptive_avg_pool2d.default "
        "adaptive_avg_pool3d.default _adaptive_avg_pool3d.default",
        _upsample: "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec "
        "upsample_linear1d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec "
        "upsample_trilinear3d.vec _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec "
        "_upsample_nearest_exact3d.vec _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec",
        _im2col: "im2col.default",
    }
)


def _rows_of_numbers(x: Any, *_: Any) -> list[int]:
    return list(range(2, x.dim())) if x.dim() > 2 else []


def _last(dims: int) -> Callable[..., list[int]]:
    return lambda x, *rest: list(range(x.dim() - dims, x.dim()))


def _means_of_part(dims: int) -> Callable[..., list[int]]:
    """Returns a function for average pooling over `dims` dims: with padding that does not count,
    the divisor of a window depends on its place, and so on the sizes."""

    def needed(x: Any, *rest: Any) -> list[int]:
        padding, counted = [*rest, None, None, None, None, None][2], [*rest, *[True] * 5][4]
        padded = any(padding) if isinstance(padding, (list, tuple)) else bool(padding)
        return [] if counted or not padded else list(range(x.dim() - dims, x.dim()))

    return needed


def _resized(x: Any, size: Any, *rest: Any) -> list[int]:
    """The dims of an interpolation, but none for integer factors, which repeat elements."""
    scales = None if size else rest[-1]
    if len(rest) == 1 and scales and all(isinstance(s, float) and s.is_integer() for s in scales):
        return []
    return list(range(2, x.dim()))


def _adapted(x: Any, sizes: Any) -> list[int]:
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    return [] if all(n == 1 for n in sizes) else list(range(x.dim() - len(sizes), x.dim()))


def _rolled(x: Any, shifts: Any, dims: Any = ()) -> list[int]:
    dims = [dims] if isinstance(dims, int) else list(dims)
    return dims or list(range(x.dim()))


# overload -> function of an ATen call's arguments: the dims of the first argument whose sizes its
# translation needs as numbers
NUMBERED: dict[str, Any] = {
    "im2col.default": _rows_of_numbers,
    "roll.default": _rolled,
    "_pdist_forward.default": lambda x, *_: [0],
    "pdist.default": lambda x, *_: [0],
    **{
        f"max_pool{n}d{kind}.default": _last(n) for n in (1, 2, 3) for kind in ("", "_with_indices")
    },
    **{f"avg_pool{n}d.default": _means_of_part(n) for n in (1, 2, 3)},
    "pad.default": padded_dims,
    **{f"adaptive_{kind}_pool{n}d.default": _adapted for n in (1, 2, 3) for kind in ("avg", "max")},
    "_adaptive_avg_pool3d.default": _adapted,
    **{name: _resized for name in TABLE if "upsample" in name},
}
