"""`torch.nn.functional.grid_sample`: reads images and volumes at points between elements."""

from __future__ import annotations

import itertools

from onward.capture.aten.call import AtenCall, table
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Size, product

_ZEROS, _BORDER, _REFLECTION = range(3)


def _grid_sample(
    c: AtenCall, x: Value, grid: Value, mode: int, padding: int, aligned: bool
) -> Value:
    """x f[N,C,D,H,W], grid f[N,*O,3] (coordinates along W, H, D) -> f[N,C,*O]; likewise in two
    dims. mode: 0 interpolates linearly between the elements around, 1 reads the nearest one."""
    samples, channels, *sizes = type_of(x).shape
    rank = len(sizes)
    count = product(type_of(grid).shape[1:-1])
    flat = c.b.reshape(x, (samples, channels, product(sizes)))
    places = c.b.reshape(grid, (samples, count, rank))
    taps: list[list[tuple[Value, Value, Value | None]]] = []
    for i, size in enumerate(sizes):
        at = c.b.squeeze(c.b.slice(places, 2, rank - 1 - i, rank - i), [2])
        at = _place(c, at, size, padding, aligned)
        taps.append(_taps(c, at, size, mode))
    total: Value | None = None
    for corner in itertools.product(*taps):
        index, inside, share = corner[0]
        for size, (place, within, part) in zip(sizes[1:], corner[1:], strict=True):
            index = c.b.Add(c.b.Mul(index, c.value(size, DType.INT64)), place)
            inside = c.b.And(inside, within)
            share = part if share is None else c.b.Mul(share, part)
        wide = c.b.expand(c.b.unsqueeze(index, [1]), (samples, channels, count))
        found = c.b.GatherElements(flat, wide, axis=2)
        if share is not None:
            found = c.b.Mul(found, c.b.unsqueeze(share, [1]))
        found = c.b.Where(c.b.unsqueeze(inside, [1]), found, c.b.scalar(0.0, type_of(x).dtype))
        total = found if total is None else c.b.Add(total, found)
    assert total is not None
    return c.b.reshape(total, c.type.shape)


def _place(c: AtenCall, u: Value, size: Size, padding: int, aligned: bool) -> Value:
    """Converts a coordinate in -1..1 to a place among `size` elements, fractions included. One
    outside moves inside as the padding mode says; with zeros it stays."""
    b, dtype = c.b, type_of(u).dtype
    number, one = c.value(size, dtype), b.scalar(1.0, dtype)
    end = b.Sub(number, one)
    x = b.Add(u, one)
    x = b.Mul(x, b.Div(end, 2.0)) if aligned else b.Div(b.Sub(b.Mul(x, number), one), 2.0)
    if padding == _ZEROS:
        return x
    if padding == _REFLECTION:
        low, span = (b.scalar(0.0, dtype), end) if aligned else (b.scalar(-0.5, dtype), number)
        flat = b.Equal(span, 0.0)  # a dim of one element
        span = b.Where(flat, one, span)
        away = b.Sub(x, low)
        away = b.Where(b.Less(away, 0.0), b.Neg(away), away)
        turns = b.Floor(b.Div(away, span))
        rest = b.Sub(away, b.Mul(turns, span))
        odd = b.Greater(b.Sub(turns, b.Mul(b.Floor(b.Div(turns, 2.0)), 2.0)), 0.5)
        x = b.Add(b.Where(odd, b.Sub(span, rest), rest), low)
        x = b.Where(flat, b.scalar(0.0, dtype), x)
    x = b.Where(b.LessOrEqual(x, 0.0), b.scalar(0.0, dtype), x)
    return b.Where(b.GreaterOrEqual(x, end), end, x)


def _taps(c: AtenCall, x: Value, size: Size, mode: int) -> list[tuple[Value, Value, Value | None]]:
    """Returns (index, whether it is inside, weight) of each element read for places x."""
    if mode == 1:
        return [(*_element(c, c.b.Round(x), size), None)]
    low = c.b.Floor(x)
    share = c.b.Sub(x, low)
    return [
        (*_element(c, low, size), c.b.Sub(1.0, share)),
        (*_element(c, c.b.Add(low, 1.0), size), share),
    ]


def _element(c: AtenCall, x: Value, size: Size) -> tuple[Value, Value]:
    zero = c.b.scalar(0.0, type_of(x).dtype)
    end = c.b.Sub(c.value(size, type_of(x).dtype), 1.0)
    inside = c.b.And(c.b.GreaterOrEqual(x, zero), c.b.LessOrEqual(x, end))
    return c.b.cast(c.b.Where(inside, x, zero), DType.INT64), inside


# bicubic sampling of images has parts: capture/translate/decompose.py
TABLE = table({_grid_sample: "grid_sampler_2d.default grid_sampler_3d.default"})
