"""Blocks of rows of normalizations, and the mask of the dropout before them: what layer and RMS
normalization have in common."""

from __future__ import annotations

import math
from typing import Any

from onward.kernels.kernel import KernelArguments
from onward.kernels.triton.random import mask_flags

WIDEST = 8192  # numbers of a row
_TILE = 4096  # elements that a program holds


def tile(features: int) -> tuple[int, int]:
    """The padded numbers of a row, and the rows of a block."""
    width = max(16, 1 << (features - 1).bit_length())
    return width, max(1, _TILE // width)


def programs_of(rows: int, features: int, most: int) -> tuple[int, int]:
    """The programs of a gradient, `most` at most, and the blocks of rows of each."""
    blocks = max(1, math.ceil(rows / tile(features)[1]))
    each = math.ceil(blocks / most)
    return math.ceil(blocks / each), each


def warps(width: int) -> int:
    """The warps of a program for rows of so many padded numbers."""
    return 4 if width <= 2048 else 8


def norm_mask(args: KernelArguments, outer: list[int], at: int) -> tuple[list[Any], dict[str, Any]]:
    """Seed, offset and coordinates, the inputs from `at` on, and the arguments of a mask."""
    seed, offset, coordinates = [*args.inputs[at:], None, None, None][:3]
    ratio = float(args.attrs.get("ratio", 0.0))
    if ratio == 0.0:
        flags = {"BOUND": 0, "RANK": len(outer), "COLUMNS": 0, "SAMPLE_COLUMN": -1,
                 "SAMPLE_DIM": -1, "HAS_OFFSET": False}  # fmt: skip
    else:
        flags = mask_flags(args, len(outer), offset, coordinates)
    present = args.y if seed is None else seed  # in the place of absent tensors
    tensors = [present if t is None else t for t in (seed, offset, coordinates)]
    return tensors, {**flags, "DROPS": ratio > 0.0}


def factor(args: KernelArguments) -> float:
    """What dropout multiplies the rest by."""
    return 1.0 / (1.0 - float(args.attrs.get("ratio", 0.0)))
