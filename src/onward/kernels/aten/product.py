"""Matrix products. Transposes are strides, never copies; batch dims that cannot be merged are
looped."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from onward.kernels.aten.row_counts import product
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch, no_rows
from onward.kernels.target import Target


def gemm_operands(args: KernelArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands of a Gemm as f[M,K] and f[K,N]; transposes are strides."""
    a = args.x(0).t() if args.attrs.get("transA") else args.x(0)
    b = args.x(1).t() if args.attrs.get("transB") else args.x(1)
    return a, b


def bind_gemm(args: KernelArguments) -> Launch:
    across = bool(args.attrs.get("transA"))
    b = args.x(1).t() if args.attrs.get("transB") else args.x(1)
    c = args.inputs[2] if len(args.inputs) > 2 else None
    return in_order(product(args.x(0), b, args.y, _spare(args), across, c))


def _spare(args: KernelArguments) -> Callable[[torch.Tensor], int]:
    """A function that returns how many spare rows a product may include: some where oneDNN computes
    it (row_counts.py), else 0."""
    low = args.y.dtype in (torch.bfloat16, torch.float16)
    return args.spare if low and args.y.device.type == "cpu" else no_rows


def in_order(calls: list[Launch]) -> Launch:
    """Joins several calls, in order, into one launch."""
    if len(calls) == 1:
        return calls[0]

    def launch() -> None:
        for call in calls:
            call()

    return launch


def unscaled(spec: KernelSpec) -> str | None:
    scaled = any(spec.attrs.get(k, 1.0) != 1.0 for k in ("alpha", "beta"))
    return "Gemm with alpha or beta" if scaled else None


def _merged(x: torch.Tensor) -> torch.Tensor | None:
    """Views x `[*S,M,K]` as `[prod(S),M,K]`; None where strides do not allow that."""
    try:
        return x.view(math.prod(x.shape[:-2]), *x.shape[-2:])
    except RuntimeError:
        return None


def _bind_matmul(args: KernelArguments) -> Launch:
    """Binds `f[*S,M,K] @ f[*S,K,N]` as few batched products."""
    y = args.y
    if y.dim() == 2:
        return in_order(product(args.x(0), args.x(1), y, _spare(args)))
    a = args.x(0).expand(*y.shape[:-2], *args.x(0).shape[-2:])
    b = args.x(1).expand(*y.shape[:-2], *args.x(1).shape[-2:])
    return in_order(_batched(a, b, y))


def _batched(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> list[Launch]:
    a3, b3, y3 = _merged(a), _merged(b), _merged(y)
    if a3 is not None and b3 is not None and y3 is not None:
        return [partial(torch.bmm, a3, b3, out=y3)]
    return [call for i in range(y.shape[0]) for call in _batched(a[i], b[i], y[i])]


def _on_the_cpu(target: Target) -> str | None:
    """None on the CPU. Elsewhere a reason: small products one by one would each be a launch."""
    return None if target.device == "cpu" else "its products of strided heads are one by one"


KERNELS: dict[str, Kernel | tuple[Kernel, ...]] = {
    "Gemm": Kernel("aten.addmm", bind_gemm, unsupported=unscaled, inplace=((0, 2),), strided=(0,)),
    "MatMul": (
        Kernel("aten.bmm", _bind_matmul, where=_on_the_cpu),
        Kernel("aten.bmm_contiguous", _bind_matmul, contiguous=None),
    ),
}
