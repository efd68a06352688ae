"""Rows read by number, set and added, each in one pass over memory: lookups in a table and their
gradients, and what packs and restores rows.

Added rows are first brought into the order of their numbers, then summed in fp32 in that order, so
that a table's gradient is the same in every run; PyTorch's operator adds in any order and rounds
after each row. Bytes per element of a gradient beside a table of zeros, whatever their types: each
updated row is read once and each row of the table written once, where filling, reading, adding and
writing take twice as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from onward.graph.types import LOW, DType, Shape, Size, Type, product
from onward.kernels.aten.data import KERNELS as PLAIN
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.supported import where

_DEEPEST = 4  # numbers of an index
_MOST = (1 << 31) - 2  # rows of a table, and updates of it
_RANKED = 8192  # updates at most whose order is counted, in n**2 comparisons; others are sorted
_TILE = 4096  # elements that a program holds
_WIDEST_COPY, _WIDEST_SUM = 1024, 128  # columns of a program's tile
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _columns(width: int, most: int) -> int:
    """The columns of a tile: the most, of a power of two, that leave few beyond the last one."""
    widest = min(most, 1 << max(0, width - 1).bit_length())
    sizes = [1 << e for e in range(min(32, widest).bit_length() - 1, widest.bit_length())]
    padded = {size: math.ceil(width / size) * size for size in sizes}
    return max(size for size in sizes if padded[size] <= 1.125 * min(padded.values()))


def _segment(width: int) -> int:
    """The updates that a program sums, in the order of their numbers."""
    return max(32, min(256, _TILE // _columns(width, _WIDEST_SUM)))


def _depth(spec: KernelSpec) -> Size:
    """The numbers that name a row."""
    index = spec.inputs[1]
    assert index is not None
    return index.shape[-1] if spec.op.endswith("ND") and index.rank else 1


# ---- which calls


def _no_index(spec: KernelSpec) -> str | None:
    index, depth = spec.inputs[1], _depth(spec)
    assert index is not None
    if index.dtype not in (DType.INT64, DType.INT32):
        return f"an index of {index.dtype.name.lower()}"
    if not isinstance(depth, int):
        return "an open depth of an index"
    return None if 1 <= depth <= _DEEPEST else f"an index of {depth} numbers"


def _unsupported_read(spec: KernelSpec) -> str | None:
    x = spec.inputs[0]
    assert x is not None
    if spec.attrs.get("batch_dims", 0):
        return "batch_dims"
    if x.dtype != spec.outputs[0].dtype or x.dtype.itemsize not in _UNITS:
        return f"{x.dtype.name.lower()} tensors"
    return _no_index(spec)


def _unsupported_write(spec: KernelSpec) -> str | None:
    kind, tensors = spec.attrs.get("reduction", "none"), [spec.inputs[0], spec.inputs[2]]
    if kind not in ("none", "add"):
        return f"a reduction by {kind}, neither none nor add"
    for t in (*tensors, spec.outputs[0]):
        assert t is not None
        summed = t.dtype in (DType.FLOAT, *LOW)
        moved = t.dtype == spec.outputs[0].dtype and t.dtype.itemsize in _UNITS
        if not (summed if kind == "add" else moved):
            return f"{t.dtype.name.lower()} tensors"
    return _no_index(spec)


def _sizes(data: Shape, index: Shape, depth: int) -> tuple[Any, Any]:
    """The number of updates, and the numbers of a row."""
    return product(index[:-1]), product(data[depth:])


def _scratch(spec: KernelSpec) -> list[Type]:
    """The temporaries of rows that are added: the numbers of their rows, the same in order, which
    update is at each place of this order, and two sums of each segment of it."""
    data, index = spec.inputs[0], spec.inputs[1]
    assert data is not None and index is not None
    if spec.attrs.get("reduction", "none") != "add":
        return []
    count, width = _sizes(data.shape, index.shape, int(index.shape[-1]))  # type: ignore[arg-type]
    segments = math.ceil(count / _segment(width))
    return [
        Type(DType.INT32, (count,)), Type(DType.INT32, (count,)), Type(DType.INT64, (count,)),
        Type(DType.FLOAT, (segments, 2, width)),
    ]  # fmt: skip


def _workspace(spec: KernelSpec) -> int:
    """The bytes that sorting allocates, and where PyTorch's operators are used, theirs."""
    index = spec.inputs[1]
    assert index is not None
    return PLAIN[spec.op].workspace(spec) + 32 * int(index.numel) + (1 << 16)


# ---- launches


def _joined(x: torch.Tensor, first: int, last: int) -> int | None:
    """The stride of the dims from `first` to `last` as one dim; None where they are not one."""
    size, stride = 1, 1
    for n, step in reversed([*zip(x.shape, x.stride(), strict=True)][first:last]):
        if n == 1:
            continue
        if size == 1:
            size, stride = n, step
        elif step == size * stride:
            size *= n
        else:
            return None
    return stride


def _places(args: KernelArguments, depth: int) -> tuple[list[int], dict[str, Any]]:
    """The sizes of the dims that an index names, and the arguments of reading it."""
    first = int(args.attrs.get("axis", 0)) % max(1, args.x().dim()) if depth == 1 else 0
    sizes = list(args.x().shape[first : first + depth])
    return [*sizes, *[1] * (_DEEPEST - depth)], {"DEPTH": depth, "NEGATIVE": True}


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as whole numbers, which are moved whatever they mean."""
    return x.view(_UNITS[x.element_size()])


def _copy_tile(width: int) -> tuple[int, int]:
    """The rows and columns of a program that copies."""
    columns = _columns(width, _WIDEST_COPY)
    return max(1, _TILE // 2 // columns), columns


def _bind_read(args: KernelArguments, op: str) -> Launch:
    from onward.kernels.triton import rows_device as device

    x, index, y = args.x(0), args.x(1), args.y
    depth = index.shape[-1] if op == "GatherND" else 1
    dim = 0 if op == "GatherND" else int(args.attrs.get("axis", 0)) % x.dim()
    outer, column = _joined(x, 0, dim), _joined(x, dim + depth, x.dim())
    row = _joined(x, dim, dim + depth)
    if outer is None or column is None or row is None:
        return PLAIN[op].bind(args)
    width = math.prod(x.shape[dim + depth :])
    count = index.numel() // max(1, depth)
    rows = math.prod(x.shape[:dim]) * count
    sizes, flags = _places(args, depth)
    flags["NEGATIVE"] = op != "Embedding"  # where -100 for a token is a mistake
    tile, columns = _copy_tile(width)
    source, target = _bits(x), _bits(y)
    grid = (math.ceil(rows / tile) * max(1, math.ceil(width / columns)),)
    kernel: Any = device.read_rows

    def launch() -> None:
        if rows:
            kernel[grid](
                source, index, target, args.flag, rows, count, width, outer, row, column, *sizes,
                OUTER=rows != count, ROWS=tile, COLUMNS=columns, num_warps=4, **flags,
            )  # fmt: skip

    return launch


def _bind_write(args: KernelArguments) -> Launch:
    data, index, y = args.x(0), args.x(1), args.y
    rows = math.prod(y.shape[: index.shape[-1]])
    if max(rows, index.numel()) > _MOST:
        return PLAIN["ScatterND"].bind(args)
    if args.attrs.get("reduction", "none") == "add":
        return _bind_add(args, rows)
    write = _bind_set(args)
    return write if data.data_ptr() == y.data_ptr() else lambda: (y.copy_(data), write())


def _bind_set(args: KernelArguments) -> Launch:
    from onward.kernels.triton import rows_device as device

    index, updates, y = args.x(1), args.x(2), args.y
    depth = index.shape[-1]
    count, width = _sizes(y.shape, index.shape, depth)
    sizes, flags = _places(args, depth)
    tile, columns = _copy_tile(width)
    source, target = _bits(updates), _bits(y)
    grid = (math.ceil(count / tile) * max(1, math.ceil(width / columns)),)
    kernel: Any = device.set_rows

    def launch() -> None:
        if count:
            kernel[grid](
                source, index, target, args.flag, count, width, *sizes, ROWS=tile,
                COLUMNS=columns, num_warps=4, **flags,
            )  # fmt: skip

    return launch


def _base(data: torch.Tensor, y: torch.Tensor, depth: int) -> tuple[int, int] | None:
    """The strides of a row and of a number of what is added to; None where it has to be copied to y
    first."""
    row, column = _joined(data, 0, depth), _joined(data, depth, data.dim())
    if data.data_ptr() == y.data_ptr() or row is None or column is None:
        return None
    return row, column


def _bind_add(args: KernelArguments, rows: int) -> Launch:
    from onward.kernels.triton import rows_device as device

    data, index, updates, y = args.x(0), args.x(1), args.x(2), args.y
    depth = index.shape[-1]
    count, width = _sizes(y.shape, index.shape, depth)
    if not count:
        return (lambda: None) if data.data_ptr() == y.data_ptr() else partial(y.copy_, data)
    numbers, ordered, order, sums = args.scratch
    base = _base(data, y, depth)
    start, strides = (y, (width, 1)) if base is None else (data, base)
    arrange = _bind_order(args, rows, (numbers, ordered, order))
    columns, segment = _columns(width, _WIDEST_SUM), _segment(width)
    tiles, segments = math.ceil(width / columns), math.ceil(count / segment)
    wide = _columns(width, 256)
    beside = max(1, _TILE // wide)  # rows of a program that writes what has no update
    adding: Any = device.add_segments
    joining: Any = device.join_segments
    filling: Any = device.fill_others
    sizes = (count, rows, width, *strides)

    def launch() -> None:
        if base is None and data.data_ptr() != y.data_ptr():
            y.copy_(data)
        arrange()
        if not y.numel():
            return
        adding[(segments * tiles,)](
            start, updates, ordered, order, y, sums, *sizes, ROWS=segment, COLUMNS=columns,
            num_warps=4,
        )  # fmt: skip
        if segments > 1:
            joining[((segments - 1) * tiles,)](
                start, ordered, y, sums, *sizes, ROWS=segment, TOGETHER=16, COLUMNS=columns,
                num_warps=4,
            )  # fmt: skip
        if base is not None:
            filling[(math.ceil(rows / beside),)](
                start, ordered, y, *sizes, count.bit_length(), UNIFORM=strides == (0, 0),
                ROWS=beside, COLUMNS=wide, num_warps=4,
            )  # fmt: skip

    return launch


def _bind_order(args: KernelArguments, rows: int, into: Sequence[torch.Tensor]) -> Launch:
    """Binds what writes the numbers of updated rows in order, and which update is at each place;
    those out of range come last, as `rows`."""
    from onward.kernels.triton import rows_device as device

    numbers, ordered, order = into
    index, count = args.x(1), order.numel()
    sizes, flags = _places(args, args.x(1).shape[-1])
    if count <= _RANKED:
        ranking: Any = device.rank_rows
        return lambda: ranking[(math.ceil(count / 16),)](
            index, ordered, order, args.flag, count, rows, *sizes, ROWS=16, OTHERS=256,
            num_warps=4, **flags,
        )  # fmt: skip
    numbering: Any = device.number_rows

    def launch() -> None:
        numbering[(math.ceil(count / 1024),)](
            index, numbers, args.flag, count, rows, *sizes, ROWS=1024, num_warps=4, **flags
        )
        torch.sort(numbers, stable=True, out=(ordered, order))

    return launch


_READ: dict[str, Any] = {"unsupported": _unsupported_read, "where": where}

KERNELS: dict[str, Kernel] = {
    **{
        op: Kernel(
            "triton.read_rows", partial(_bind_read, op=op), contiguous=contiguous,
            workspace=PLAIN[op].workspace, input_error=PLAIN[op].input_error, **_READ,
        )
        for op, contiguous in (("Gather", (1,)), ("Embedding", (1,)), ("GatherND", (0, 1)))
    },
    "ScatterND": Kernel(
        "triton.write_rows", _bind_write, unsupported=_unsupported_write, where=where,
        inplace=((0, 0),), contiguous=(1, 2), scratch=_scratch, workspace=_workspace,
        input_error=PLAIN["ScatterND"].input_error,
    ),
}  # fmt: skip
