"""Sizes of attention's blocks, by the width of a head and by the device.

The registers of a thread decide: a block of dk and dv keeps both sums beside the scores. Only
compute capability 9.0 has been timed, at heads of 64; the blocks for other kinds of devices are
those that spill least where the kernels are compiled (`tests/kernels/triton_budgets.json`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

Capability = str | tuple[int, int]  # `Target.capability`


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a kernel's blocks. rows: of queries; keys: of keys."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class AttentionBlocks:
    """The blocks of the kernels for one width. by_query: of dq and of the bias's gradient; by_key:
    of dk and dv."""

    forward: BlockSizes
    by_query: BlockSizes
    by_key: BlockSizes


Table = dict[int, AttentionBlocks]  # by a head's padded width, at most


def _of(*sizes: tuple[int, int, int, int]) -> AttentionBlocks:
    """The forward's, dq's, and dk and dv's: rows, keys, warps and stages."""
    return AttentionBlocks(*(BlockSizes(*each) for each in sizes))


# ---- compute capability 9.0 and 10.x, and what is unknown

_LOW: Table = {
    64: _of((64, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 2)),
    128: _of((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
    256: _of((64, 32, 4, 2), (32, 32, 4, 1), (32, 32, 4, 1)),
}
_FULL: Table = {
    64: _of((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    128: _of((32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 2)),
    256: _of((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}

# ---- 8.x and 12.x, whose products take operands from registers. All but 8.0 have 99 KB of shared
# memory for a block, of which a bias and a mask of f32 take most

_LOW_OF_AMPERE: Table = {
    64: _of((64, 64, 4, 2), (64, 32, 4, 3), (64, 32, 4, 2)),
    128: _of((128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)),
    256: _LOW[256],
}

# ---- AMD's, whose warps have 64 threads; more than one stage is kept in registers

_LOW_OF_AMD: Table = {
    64: _of((64, 64, 4, 1), (64, 32, 4, 1), (32, 64, 4, 1)),
    128: _of((128, 64, 8, 1), (64, 32, 4, 1), (16, 64, 4, 1)),
    256: _of((64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
}
_FULL_OF_AMD: Table = {
    64: replace(_FULL[64], by_key=BlockSizes(32, 32, 4, 1)),
    128: replace(_FULL[128], by_key=BlockSizes(32, 32, 4, 1)),
    256: _FULL[256],
}

_TABLES = ((_LOW, _FULL), (_LOW_OF_AMPERE, _FULL), (_LOW_OF_AMD, _FULL_OF_AMD))


def blocks_for(capability: Capability, low: bool, width: int) -> AttentionBlocks:
    """The blocks on a device for heads of up to so many numbers, in fp32 or less (low)."""
    if isinstance(capability, str):
        kind = 2 if capability.startswith("gfx") else 0
    else:
        kind = 1 if capability[0] in (8, 12) else 0
    return _of_width(_TABLES[kind][0 if low else 1], width)


def smallest_blocks(low: bool, width: int) -> AttentionBlocks:
    """The smallest rows and keys of each kernel's blocks on any device."""
    found = [_of_width(tables[0 if low else 1], width) for tables in _TABLES]

    def least(sizes: Iterable[BlockSizes]) -> BlockSizes:
        columns = zip(*map(astuple, sizes), strict=True)
        return BlockSizes(*map(min, columns))

    return AttentionBlocks(
        least(b.forward for b in found), least(b.by_query for b in found),
        least(b.by_key for b in found),
    )  # fmt: skip


def _of_width(table: Table, width: int) -> AttentionBlocks:
    return table[min(size for size in table if size >= width)]


__all__ = ["AttentionBlocks", "BlockSizes", "Capability", "blocks_for", "smallest_blocks"]
