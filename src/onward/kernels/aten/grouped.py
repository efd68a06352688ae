"""Grouped matrix products: one product for each group that has rows."""

from __future__ import annotations

from itertools import pairwise

import torch

from onward.kernels.kernel import Kernel, KernelArguments, Launch
from onward.kernels.target import Target


def _on_the_cpu(target: Target) -> str | None:
    return None if target.device == "cpu" else "the host reads where groups end"


def _bounds(ends: torch.Tensor, rows: int) -> list[int]:
    """The first row of each group and the end of the last, limited to 0..rows and ascending."""
    bounds = [0]
    for end in ends.tolist():
        bounds.append(min(max(end, bounds[-1]), rows))
    return bounds


def _bind_grouped(args: KernelArguments) -> Launch:
    x, w, ends = (args.x(i) for i in range(3))
    y = args.y

    def launch() -> None:
        bounds = _bounds(ends, len(x))
        for matrix, (start, end) in zip(w.unbind(0), pairwise(bounds), strict=True):
            if end > start:
                torch.mm(x[start:end], matrix, out=y[start:end])
        y[bounds[-1] :].zero_()

    return launch


def _bind_outer(args: KernelArguments) -> Launch:
    x, dy, ends = (args.x(i) for i in range(3))
    y = args.y

    def launch() -> None:
        bounds = _bounds(ends, len(x))
        for matrix, (start, end) in zip(y.unbind(0), pairwise(bounds), strict=True):
            if end > start:
                torch.mm(x[start:end].t(), dy[start:end], out=matrix)
            else:
                matrix.zero_()

    return launch


KERNELS: dict[str, Kernel] = {
    "GroupedMatMul": Kernel("aten.mm_by_group", _bind_grouped, where=_on_the_cpu),
    "GroupedOuter": Kernel("aten.mm_by_group", _bind_outer, where=_on_the_cpu),
}
