"""`onward::region`: a module's call as one op of an exported program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onward.capture.regions.shapes import Results

# the results of each region of the present capture, by site; one capture runs at a time
RESULTS: list[Results] = []


@torch.library.custom_op("onward::region", mutates_args=())
def region(xs: list[torch.Tensor], parameters: list[torch.Tensor], site: int) -> list[torch.Tensor]:
    """Placeholder op: returns the tensors that the region with this site does."""
    raise NotImplementedError("onward::region exists during capture only")


@region.register_fake
def _(xs: Sequence[Any], parameters: Sequence[Any], site: int) -> Any:
    like = [*xs, *parameters][0]
    return [
        like.new_empty(shape, dtype=dtype)
        for shape, dtype in RESULTS[site].of([x.shape for x in xs])
    ]


__all__ = ["RESULTS", "region"]
