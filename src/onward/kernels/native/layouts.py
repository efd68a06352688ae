"""Strided tensors of up to four dims as arguments of C functions."""

from __future__ import annotations

from typing import Any

import torch

from onward.kernels.kernel import KernelSpec

DIMS = 4


def layouts(**tensors: torch.Tensor) -> dict[str, Any]:
    """The tensors and their strides, by argument name."""
    return {**tensors, **{f"{name}_strides": x.stride() for name, x in tensors.items()}}


def of_four_dims(x: torch.Tensor) -> torch.Tensor:
    """Views x as a tensor of four dims, with leading dims of size 1."""
    return x[(None,) * (DIMS - x.dim())]


def more_dims(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: a tensor has more than four dims."""
    most = max(t.rank for t in (*spec.inputs, *spec.outputs) if t is not None)
    return f"{most} dims" if most > DIMS else None


__all__ = ["layouts", "more_dims", "of_four_dims"]
