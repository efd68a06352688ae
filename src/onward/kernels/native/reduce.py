"""Sums in a training step: a linear layer's bias gradient, and the norm of a gradient.

On 2 threads of an AMD EPYC (AVX-512), 2026-11-21, from `benchmarks/kernel_times.py`, torch's in
parentheses: columns of 1024 x 1536 in 48 us (59), of 700 x 28785 in 2.5 ms (4.0); the norm of 50257
x 512, summed in fp64, 2.3 ms, 45 GB/s (3.4, summed in fp32). 1024 x 2048 in f32, bf16 and fp16,
2026-11-24: columns in 52, 36 and 96 us, the norm in 68, 104 and 227.
"""

from __future__ import annotations

import math

from onward.graph.types import DType, Type, product
from onward.kernels.aten import TABLE as ATEN
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.activation import row_parts
from onward.kernels.native.library import library, one_element_type, where

BLOCK = 16384  # elements whose squares are summed before the sum is stored


def _reduced(spec: KernelSpec) -> int:
    """The number of leading dims that a sum reduces; 0 where it reduces others.

    Without the attribute `axes` it follows from the types alone, which is ambiguous where two dims
    are equal; `_bind_sum_rows` then reads the axes.
    """
    x, y = spec.inputs[0], spec.outputs[0]
    assert x is not None
    axes = spec.attrs.get("axes")
    if axes is not None:
        dims = sorted(int(a) % x.rank for a in axes)
        return len(dims) if len(dims) < x.rank and dims == list(range(len(dims))) else 0
    for count in range(1, x.rank):
        kept = x.shape[count:]
        if y.shape == (*([1] * count if spec.attrs.get("keepdims", 1) else []), *kept):
            return count
    return 0


def _not_leading(spec: KernelSpec) -> str | None:
    return one_element_type(spec) or (
        None if _reduced(spec) else "a sum over other dims than leading ones"
    )


def _sum_scratch(spec: KernelSpec) -> list[Type]:
    x, count = spec.inputs[0], _reduced(spec)
    assert x is not None
    rows = product(x.shape[:count])
    assert isinstance(rows, int)
    return [Type(DType.FLOAT, (row_parts(rows), *x.shape[count:]))]


def _bind_sum_rows(args: KernelArguments) -> Launch:
    x, y, (partial,) = args.x(), args.y, args.scratch
    count = x.dim() - (partial.dim() - 1)
    dims = [d % x.dim() for d in args.x(1).tolist()] if len(args.inputs) > 1 else []
    if sorted(dims) != list(range(count)) or not x.is_contiguous():
        return ATEN["ReduceSum"][0].bind(args)
    c = library()
    assert c is not None
    rows = math.prod(x.shape[:count])
    return c.launch(
        "onward_sum_rows", x=x, y=y, partial=partial, rows=rows, features=y.numel(),
        parts=partial.shape[0],
    )  # fmt: skip


def _part_of_dims(spec: KernelSpec) -> str | None:
    y = spec.outputs[0]
    return one_element_type(spec) or (
        None if all(n == 1 for n in y.shape) else "a norm over some dims"
    )


def _norm_scratch(spec: KernelSpec) -> list[Type]:
    x = spec.inputs[0]
    assert x is not None
    n = product(x.shape)
    assert isinstance(n, int)
    return [Type(DType.DOUBLE, (max(1, -(-n // BLOCK)),))]


def _bind_norm(args: KernelArguments) -> Launch:
    x = args.x()
    if not x.is_contiguous() or args.y.numel() != 1:
        return ATEN["ReduceL2"][0].bind(args)
    c = library()
    assert c is not None
    return c.launch("onward_norm", x=x, y=args.y, partial=args.scratch[0], n=x.numel(), block=BLOCK)


KERNELS: dict[str, Kernel] = {
    "ReduceSum": Kernel(
        "native.sum_rows",
        _bind_sum_rows,
        unsupported=_not_leading,
        where=where,
        scratch=_sum_scratch,
    ),
    "ReduceL2": Kernel(
        "native.norm", _bind_norm, unsupported=_part_of_dims, where=where, scratch=_norm_scratch
    ),
}
