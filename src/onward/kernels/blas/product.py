"""Gemm by a BLAS called from the kernel's own threads: `y = a b + c`, with transposes as strides
and c in place.

GFLOP/s on 2 threads of an AMD EPYC (AVX-512), 2026-11-21, OpenBLAS so called against torch.mm:
1024x50257x512 202 against 130, 700x28785x200 186 against 100, 1024x1536x512 185 against 93.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from onward.kernels.aten.product import bind_gemm, gemm_operands, unscaled
from onward.kernels.blas.choice import Shape, choose
from onward.kernels.blas.engines import engines
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, only_f32, where
from onward.kernels.target import Target


def _stored(x: torch.Tensor) -> tuple[bool, int] | None:
    """Whether `f32[rows,columns]` is stored transposed, and the stride between its lines.

    None where neither dim has stride 1, which no BLAS supports.
    """
    (rows, columns), (down, along) = x.shape, x.stride()
    if (along == 1 or columns == 1) and (down >= columns or rows == 1):
        return False, max(down, columns, 1)
    if (down == 1 or rows == 1) and (along >= rows or columns == 1):
        return True, max(along, rows, 1)
    return None


def product_arguments(
    a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, c: torch.Tensor | None
) -> dict[str, Any] | None:
    """The arguments of `y = a b (+ c)` for the native products, by name; None where no BLAS
    supports the strides."""
    left, right, out = _stored(a), _stored(b), _stored(y)
    if left is None or right is None or out is None or out[0]:
        return None
    row = None if c is None else c.expand(y.shape)
    if row is not None and row.stride(1) != 1 and y.shape[1] > 1:
        return None
    return {
        "ta": int(left[0]), "tb": int(right[0]), "m": y.shape[0], "n": y.shape[1],
        "k": a.shape[1], "a": a, "lda": left[1], "b": b, "ldb": right[1], "c": row,
        "c_stride": 0 if row is None or y.shape[0] == 1 else row.stride(0), "y": y, "ldy": out[1],
    }  # fmt: skip


def bind(engine: str, args: KernelArguments) -> Launch:
    """The launch of `y = a b (+ c)` on an engine, or torch's own where no BLAS supports the
    strides."""
    a, b = gemm_operands(args)
    c = args.inputs[2] if len(args.inputs) > 2 else None
    operands = product_arguments(a, b, args.y, c)
    if operands is None or a.shape[1] == 0:
        return bind_gemm(args)
    native = library()
    assert native is not None
    return native.launch("onward_gemm", blas=engines()[engine].layout, **operands)


def shape_of(spec: KernelSpec) -> Shape:
    """The product that a Gemm asks for."""
    a, y = spec.inputs[0], spec.outputs[0]
    assert a is not None
    ta, tb = bool(spec.attrs.get("transA")), bool(spec.attrs.get("transB"))
    m, n, k = y.shape[0], y.shape[1], a.shape[0 if ta else 1]
    assert isinstance(m, int) and isinstance(n, int) and isinstance(k, int)
    return Shape(m, n, k, ta, tb)


def _unsupported(spec: KernelSpec) -> str | None:
    return only_f32(spec) or unscaled(spec)


def _faster(engine: str, spec: KernelSpec) -> str | None:
    best = choose(shape_of(spec))
    return None if best == engine else best


def _where(engine: str, target: Target) -> str | None:
    reason = where(target)
    if reason is None and engine not in engines():
        return f"{engine} was not found"
    return reason


KERNELS: dict[str, tuple[Kernel, ...]] = {
    "Gemm": tuple(
        Kernel(
            f"{engine}.sgemm",
            partial(bind, engine),
            where=partial(_where, engine),
            unsupported=_unsupported,
            faster=partial(_faster, engine),
            inplace=((0, 2),),
            strided=(0,),
        )
        for engine in ("openblas", "mkl")
    )
}
