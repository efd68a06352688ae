"""Ops of mixtures of experts: rows multiplied by group, and histograms."""

from __future__ import annotations

from onward.capture.aten.call import AtenCall, table
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType


def _grouped(
    c: AtenCall, x: Value, w: Value, ends: Value | None = None, bias: Value | None = None,
    dtype: object = None,
) -> Value:  # fmt: skip
    """x f[S,K], w f[E,K,N], ends i32[E] or i64[E] -> f[S,N]: the rows of group e, which end before
    row ends[e], times w[e]."""
    if ends is None or bias is not None or (type_of(x).rank, type_of(w).rank) != (2, 3):
        raise CaptureError(
            "grouped_mm is translated for x[S,K], weights[E,K,N] and offs, "
            "without bias; fix: use that form, or matmul"
        )
    return c.b.GroupedMatMul(x, w, c.b.cast(ends, DType.INT64))


def _histogram(c: AtenCall, x: Value, bins: int = 100, low: float = 0, high: float = 0) -> Value:
    """x f[*] -> the counts f[bins] of numbers in equal parts of the range from low to high, of
    which the last includes its end."""
    if low >= high:
        raise CaptureError("histc without min and max has no translation; fix: give both")
    dtype = type_of(x).dtype
    rank = type_of(x).rank
    place = c.b.Mul(c.b.Sub(x, c.b.scalar(float(low), dtype)), float(bins))
    place = c.b.Div(place, c.b.scalar(float(high - low), dtype))  # rounded as in torch
    place = c.b.Min(c.b.Floor(place), c.b.scalar(float(bins - 1), dtype))
    inside = c.b.And(
        c.b.GreaterOrEqual(x, c.b.scalar(float(low), dtype)),
        c.b.LessOrEqual(x, c.b.scalar(float(high), dtype)),
    )
    place = c.b.Where(inside, place, c.b.scalar(-1.0, dtype))
    hit = c.b.Equal(c.b.unsqueeze(place, [rank]), c.b.cast(c.b.arange(bins), dtype))
    return c.b.reduce_sum(c.b.cast(hit, dtype), list(range(rank)), keepdims=False)


TABLE = table(
    {
        _grouped: "_grouped_mm.default transformers.grouped_mm_fallback.default "
        "onward.rows_by_group.default",
        _histogram: "histc.default",
    }
)
