"""Products of bf16 and fp16 on processors without instructions for them: blocks of the operands are
widened to f32, multiplied by a BLAS, and rounded once.

oneDNN multiplies them there by emulation. GFLOP/s of 512x6400x1600 on 2 threads of a busy Intel
Xeon with AVX-512 but without AVX512-BF16, 2026-11-28: bf16 56, torch.mm 15; fp16 55, torch.mm 1.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from onward.graph.types import DType, Type
from onward.kernels.aten.product import bind_gemm, gemm_operands, unscaled
from onward.kernels.blas.choice import TORCH, Shape, choose_called, forced
from onward.kernels.blas.engines import engines
from onward.kernels.blas.product import product_arguments, shape_of
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, where
from onward.kernels.target import Target

_ROWS, _COLUMNS, _DEPTH = 512, 256, 2048  # of a block, at most


def _blocks(m: int, n: int, k: int, threads: int) -> tuple[int, int, int]:
    """The rows, columns and depth of a block: columns are shared evenly by the threads."""
    shares = threads * max(1, math.ceil(n / (threads * _COLUMNS)))
    columns = math.ceil(max(1, n) / shares / 16) * 16
    return max(1, min(m, _ROWS)), columns, max(1, min(k, _DEPTH))


def low_scratch(m: int, n: int, k: int) -> list[Type]:
    """The scratch of a product `[m,k] [k,n]` with these sizes at most."""
    threads = torch.get_num_threads()
    # the size of the second records the threads planned for, whatever the setting is later
    return [Type(DType.FLOAT, (_room(m, n, k, threads),)), Type(DType.BOOL, (threads,))]


def _room(m: int, n: int, k: int, threads: int) -> int:
    """The numbers of scratch that are enough for these sizes and for all smaller ones, whose blocks
    may be wider: a block of rows of a, or of a and of y, and what each thread has."""
    rows, _, depth = _blocks(m, n, k, threads)
    columns = min(_COLUMNS, math.ceil(max(1, n) / 16) * 16)
    return rows * (depth + min(n, k)) + threads * columns * (depth + rows)


def _used(m: int, n: int, k: int, threads: int) -> int:
    """The numbers of scratch that `onward_gemm_low` uses."""
    rows, columns, depth = _blocks(m, n, k, threads)
    shared = depth + n if k > n else k
    return rows * shared + threads * columns * (depth + rows)


def low_product(
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    scratch: list[torch.Tensor],
    c: torch.Tensor | None = None,
) -> Launch | None:
    """Returns the launch of `y = a b (+ c)`, all of one low type; None where no BLAS supports the
    strides. scratch: of `low_scratch`, for these sizes or larger ones."""
    native = library()
    assert native is not None
    operands = product_arguments(a, b, y, c)
    if operands is None:
        return None
    (m, n), k, threads = y.shape, a.shape[1], scratch[1].numel()
    rows, columns, depth = _blocks(m, n, k, threads)
    assert _used(m, n, k, threads) <= scratch[0].numel(), "scratch of a smaller product"
    shape = Shape(rows, columns, depth, bool(operands["ta"]), bool(operands["tb"]))
    return native.launch(
        "onward_gemm_low", blas=engines()[choose_called(shape)].layout, **operands, rows=rows,
        columns=columns, depth=depth, threads=threads, room=scratch[0].numel(), scratch=scratch[0],
    )  # fmt: skip


def _bind(args: KernelArguments) -> Launch:
    a, b = gemm_operands(args)
    c = args.inputs[2] if len(args.inputs) > 2 else None
    return low_product(a, b, args.y, args.scratch, c) or bind_gemm(args)


def _scratch(spec: KernelSpec) -> list[Type]:
    m, n, k, *_ = shape_of(spec)
    return low_scratch(m, n, k)


def _unsupported(dtype: DType, spec: KernelSpec) -> str | None:
    types = (*spec.inputs, *spec.outputs)
    if any(t is not None and t.dtype != dtype for t in types):
        return f"tensors that are not all {dtype.name.lower()}"
    if any(t is not None and t.rank != 2 for t in spec.inputs[:2]):
        return "more than two dims"
    return unscaled(spec)


def widens(dtype: DType, target: Target) -> str | None:
    """None where products of a low type are best widened on a target, else the reason."""
    reason = where(target)
    if reason is not None:
        return reason
    if target.multiplies_bf16 if dtype == DType.BFLOAT16 else target.multiplies_fp16:
        return "the processor multiplies such numbers itself"
    if forced() == TORCH or not engines():
        return "no BLAS to call"
    return None


KERNELS: dict[str, tuple[Kernel, ...]] = {
    op: tuple(
        Kernel(
            f"blas.{name}_gemm",
            _bind,
            where=partial(widens, dtype),
            unsupported=partial(_unsupported, dtype),
            scratch=_scratch,
            inplace=((0, 2),) if op == "Gemm" else (),
            strided=(0,),
        )
        for name, dtype in (("bf16", DType.BFLOAT16), ("fp16", DType.FLOAT16))
    )
    for op in ("Gemm", "MatMul")
}
