"""Lookup of embedding rows, and the gradient that adds rows to a table.

On 2 threads of an AMD EPYC (AVX-512), 2026-11-21, from `benchmarks/kernel_times.py`: 1024 rows of
512 read in 23 us (torch 25), added in 126 (199); 700 rows of 200 added to 28785 rows of zeros in
181 (215), most of it for filling the zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from onward.graph.types import DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, only_f32, where


def _no_such_row(op: str, args: KernelArguments, flag: Sequence[int]) -> IndexError:
    """The error for a row number out of range. flag: the first such number."""
    return IndexError(
        f"{op}: the index {flag[1]} is out of range for a table (such as "
        f"nn.Embedding) of {args.x().shape[0]} rows"
    )


def _not_rows(spec: KernelSpec) -> str | None:
    x, ids = spec.inputs[0], spec.inputs[1]
    assert x is not None and ids is not None
    if x.dtype != DType.FLOAT or ids.dtype != DType.INT64:
        return f"{x.dtype.name.lower()} tensors"
    return None if spec.attrs.get("axis", 0) % x.rank == 0 else "not rows: axis is not 0"


def _bind_gather(args: KernelArguments) -> Launch:
    table, ids, y = args.x(0), args.x(1), args.y
    c = library()
    assert c is not None
    rows = table.shape[0]
    width = table.numel() // max(rows, 1)
    return c.launch(
        "onward_gather_rows", table=table, rows=rows, width=width, ids=ids, count=ids.numel(), y=y,
        flag=args.flag,
    )  # fmt: skip


def _not_added_rows(spec: KernelSpec) -> str | None:
    index = spec.inputs[1]
    assert index is not None
    reason = only_f32(spec)
    if reason is None and index.shape[-1:] != (1,):
        reason = "not rows: an index of several dims"
    if reason is None and spec.attrs.get("reduction", "none") != "add":
        reason = "not rows added"
    return reason


def _bind_scatter(args: KernelArguments) -> Launch:
    data, ids, updates, y = args.x(0), args.x(1), args.x(2), args.y
    c = library()
    assert c is not None
    lies_there = data.data_ptr() == y.data_ptr()
    uniform = not lies_there and not any(data.stride())  # zeros, expanded
    strided = not (lies_there or uniform or data.is_contiguous())
    rows = y.shape[0]
    add = c.launch(
        "onward_add_rows", data=None if lies_there or strided else data, uniform=int(uniform), y=y,
        rows=rows, width=y.numel() // max(rows, 1), ids=ids, updates=updates, count=ids.numel(),
        flag=args.flag,
    )  # fmt: skip
    return (lambda: (y.copy_(data), add())) if strided else add


_GATHER = Kernel(
    "native.gather_rows", _bind_gather, unsupported=_not_rows, where=where, contiguous=None,
    input_error=partial(_no_such_row, "Gather"),
)  # fmt: skip

KERNELS: dict[str, Kernel] = {
    "Gather": _GATHER,
    "Embedding": _GATHER,
    "ScatterND": Kernel(
        "native.add_rows", _bind_scatter, unsupported=_not_added_rows, where=where,
        inplace=((0, 0),), contiguous=(1, 2), input_error=partial(_no_such_row, "ScatterND"),
    ),
}  # fmt: skip
