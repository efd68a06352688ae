"""Tensors as the C functions take them where they lie: with their strides, of four dims."""

from __future__ import annotations

from typing import Any

import torch

from onward.kernels.kernel import KernelSpec

DIMS = 4


def layouts(**tensors: torch.Tensor) -> dict[str, Any]:
    """Tensors with their strides beside them."""
    return {**tensors, **{f"{name}_strides": x.stride() for name, x in tensors.items()}}


def of_four_dims(x: torch.Tensor) -> torch.Tensor:
    """x as a tensor of four dims, with dims of size 1 before its own."""
    return x[(None,) * (DIMS - x.dim())]


def more_dims(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: some tensor has more than four dims."""
    most = max(t.rank for t in (*spec.inputs, *spec.outputs) if t is not None)
    return f"{most} dims" if most > DIMS else None


__all__ = ["layouts", "more_dims", "of_four_dims"]
