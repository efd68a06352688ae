"""Device code of GroupNorm and its gradient; imported only where Triton is installed.

x f[N,C,*S] is read as groups of `width` numbers, the `share` channels of a group at `places`
positions each.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit(do_not_specialize=["rows", "groups", "share"])
def group_norm(
    x, scale, bias, y, mean, invstd, rows, width, places, groups, share, epsilon,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Normalises ROWS whole groups. WIDTH: the power of two at or above `width`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (at < width)[None, :]
    place = (row * width)[:, None] + at[None, :]
    content = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    centre = tl.sum(content, 1) / width
    off = tl.where(inside, content - centre[:, None], 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(off * off, 1) / width + epsilon)
    result = off * inverse[:, None]
    channel = ((row % groups) * share)[:, None] + (at // places)[None, :]
    if HAS_SCALE:
        result *= tl.load(scale + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + row, centre, mask=row < rows)
    tl.store(invstd + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=["parts", "tiles"])
def group_moments(x, moments, width, parts, tiles, TILE: tl.constexpr):
    """Writes the mean of each part of a group, and the sum of the squares of what is off it:
    moments f32[N*G*parts, 2]. A part is `tiles` tiles, the last one of a group less."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    first = (tl.program_id(0) % parts) * tiles * TILE
    centre, squares, held = 0.0, 0.0, 0.0
    for tile in range(tiles):
        at = first + tile * TILE + tl.arange(0, TILE)
        content = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        more = tl.minimum(width - first - tile * TILE, TILE)
        count = tl.maximum(more, 0).to(tl.float32)
        own = tl.sum(content, 0) / tl.maximum(count, 1.0)
        off = tl.where(at < width, content - own, 0.0)
        change, all_held = own - centre, held + count
        share = count / all_held
        squares += tl.sum(off * off, 0) + change * change * held * share
        centre += change * share
        held = all_held
    tl.store(moments + tl.program_id(0).to(tl.int64) * 2, centre)
    tl.store(moments + tl.program_id(0).to(tl.int64) * 2 + 1, squares)


@triton.jit(do_not_specialize=["groups", "share", "parts", "tiles"])
def group_norm_of_parts(
    x, scale, bias, y, mean, invstd, moments, width, places, groups, share, epsilon, parts, tiles,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Normalises a part of a group, whose mean and squares are those of all parts together. PARTS:
    the power of two at or above `parts`."""
    row = (tl.program_id(0) // parts).to(tl.int64)
    size = tiles * TILE
    part = tl.arange(0, PARTS)
    count = tl.minimum(width - part * size, size).to(tl.float32)
    kept = moments + (row * parts + part) * 2
    means = tl.load(kept, mask=part < parts, other=0.0).to(tl.float32)
    squares = tl.load(kept + 1, mask=part < parts, other=0.0).to(tl.float32)
    centre = tl.sum(tl.where(part < parts, means * (count / width), 0.0), 0)
    off = tl.where(part < parts, means - centre, 0.0)
    variance = tl.sum(squares + tl.where(part < parts, off * off * count, 0.0), 0) / width
    inverse = 1.0 / tl.sqrt_rn(variance + epsilon)
    if tl.program_id(0) % parts == 0:
        tl.store(mean + row, centre)
        tl.store(invstd + row, inverse)
    first = (tl.program_id(0) % parts) * size
    for tile in range(tiles):
        at = first + tile * TILE + tl.arange(0, TILE)
        content = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        result = (content - centre) * inverse
        channel = (row % groups) * share + at // places
        if HAS_SCALE:
            result *= tl.load(scale + channel, mask=at < width, other=0.0).to(tl.float32)
        if HAS_BIAS:
            result += tl.load(bias + channel, mask=at < width, other=0.0).to(tl.float32)
        tl.store(y + row * width + at, result.to(y.dtype.element_ty), mask=at < width)


# ---- the gradient


@triton.jit(do_not_specialize=["rows", "channels", "groups", "share", "parts", "tiles"])
def channel_sums(
    dy, x, mean, invstd, sums, rows, channels, groups, share, places, parts, tiles,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums dy times the normalised x, and dy, over a part of the positions of ROWS channels of
    samples: sums f32[parts, N, 2, C]."""
    part = tl.program_id(0) % parts
    row = (tl.program_id(0) // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    sample, channel = row // channels, row % channels
    group = sample * groups + channel // share
    centre = tl.load(mean + group, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    inverse = tl.load(invstd + group, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    slope = tl.zeros([ROWS, COLUMNS], tl.float32)
    level = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(tiles):
        at = (part * tiles + tile) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (at < places)[None, :]
        place = (row * places)[:, None] + at[None, :]
        given = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        content = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        slope += tl.where(inside, given * ((content - centre) * inverse), 0.0)
        level += given
    to = sums + ((part * (rows // channels) + sample) * 2) * channels + channel
    tl.store(to, tl.sum(slope, 1), mask=row < rows)
    tl.store(to + channels, tl.sum(level, 1), mask=row < rows)


@triton.jit(do_not_specialize=["count", "channels"])
def channel_totals(
    sums, dscale, dbias, count, channels, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums f32[count, 2, C] over the first dim."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slope = tl.zeros([TOGETHER, COLUMNS], tl.float32)
    level = tl.zeros([TOGETHER, COLUMNS], tl.float32)
    for first in range(0, count, TOGETHER):
        row = first + tl.arange(0, TOGETHER)
        inside = (row < count)[:, None] & (channel < channels)[None, :]
        place = sums + (row.to(tl.int64) * 2 * channels)[:, None] + channel[None, :]
        slope += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        level += tl.load(place + channels, mask=inside, other=0.0).to(tl.float32)
    within = channel < channels
    tl.store(dscale + channel, tl.sum(slope, 0).to(dscale.dtype.element_ty), mask=within)
    tl.store(dbias + channel, tl.sum(level, 0).to(dbias.dtype.element_ty), mask=within)


@triton.jit(
    do_not_specialize=["samples", "channels", "groups", "share", "parts", "pieces", "tiles"]
)
def group_norm_gradient(
    dy, x, scale, mean, invstd, sums, dx, width, places, samples, channels, groups, share, parts,
    pieces, tiles,
    HAS_SCALE: tl.constexpr, PARTS: tl.constexpr, TOGETHER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Computes dx of a piece of a group, `tiles` tiles. TOGETHER: the channels whose sums are read
    at once."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    sample, group = row // groups, row % groups
    part = tl.arange(0, PARTS)
    slopes, levels = tl.zeros([TOGETHER], tl.float32), tl.zeros([TOGETHER], tl.float32)
    for start in range(0, share, TOGETHER):
        own = start + tl.arange(0, TOGETHER)
        channel = group * share + own
        inside = (part < parts)[:, None] & (own < share)[None, :]
        kept = sums + ((part * samples + sample) * 2 * channels)[:, None] + channel[None, :]
        slope = tl.sum(tl.load(kept, mask=inside, other=0.0).to(tl.float32), 0)
        level = tl.sum(tl.load(kept + channels, mask=inside, other=0.0).to(tl.float32), 0)
        if HAS_SCALE:
            weight = tl.load(scale + channel, mask=own < share, other=0.0).to(tl.float32)
            slope, level = slope * weight, level * weight
        slopes += slope
        levels += level
    slope, level = tl.sum(slopes, 0) / width, tl.sum(levels, 0) / width
    centre = tl.load(mean + row).to(tl.float32)
    inverse = tl.load(invstd + row).to(tl.float32)
    first = (tl.program_id(0) % pieces) * tiles * TILE
    for tile in range(tiles):
        at = first + tile * TILE + tl.arange(0, TILE)
        g = tl.load(dy + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        content = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        if HAS_SCALE:
            channel = group * share + at // places
            g *= tl.load(scale + channel, mask=at < width, other=0.0).to(tl.float32)
        unit = (content - centre) * inverse
        result = inverse * (g - level - unit * slope)
        tl.store(dx + row * width + at, result.to(dx.dtype.element_ty), mask=at < width)
