"""Kernels of an adaptive sum, by segments of columns; matrices are converted a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from onward.graph.ops.adasum import segments
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch

_PIECE = 1 << 17  # elements that are converted at once: a piece of f64 is 1 MB


def _pieces(rows: int, columns: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of a matrix of at most so many elements."""
    across = min(columns, most)
    down = max(1, most // across)
    for row in range(0, rows, down):
        for column in range(0, columns, across):
            yield slice(row, row + down), slice(column, column + across)


def _bind_dots(args: KernelArguments) -> Launch:
    a, b, y = args.x(0), args.x(1), args.y

    def launch() -> None:
        y.zero_()
        for i, (start, stop) in enumerate(segments(args.attrs)):
            left, right = a[:, start:stop], b[:, start:stop]
            for rows, columns in _pieces(len(a), stop - start, _PIECE):
                u, v = (x[rows, columns].double().reshape(-1) for x in (left, right))
                y[0, i] += u.dot(v)
                y[1, i] += u.dot(u)
                y[2, i] += v.dot(v)

    return launch


def _workspace(spec: KernelSpec) -> int:
    """Bytes of three pieces of matrices, converted."""
    a = spec.inputs[0]
    assert a is not None
    return 24 * min(a.numel, _PIECE) + 64 * len(spec.attrs["sizes"]) + 4096


def _bind_mix(args: KernelArguments) -> Launch:
    a, b, factors, y = args.x(0), args.x(1), args.x(2), args.y
    wide = torch.float32 if y.dtype.itemsize < 4 else y.dtype

    def launch() -> None:
        scales = factors.to(wide)
        for i, (start, stop) in enumerate(segments(args.attrs)):
            left, right, mixed = (x[:, start:stop] for x in (a, b, y))
            for at in _pieces(len(a), stop - start, _PIECE):
                total = left[at].to(wide) * scales[0, i]
                total += right[at].to(wide) * scales[1, i]
                mixed[at].copy_(total)

    return launch


KERNELS: dict[str, Kernel] = {
    "DotsBySegment": Kernel("aten.dots_by_segment", _bind_dots, workspace=_workspace),
    "MixBySegment": Kernel(
        "aten.mix_by_segment", _bind_mix, workspace=_workspace, inplace=((0, 0), (0, 1))
    ),
}
