"""Kernels in Triton, for CUDA devices, where PyTorch's operators would take many passes."""

from onward.kernels.kernel import Kernel
from onward.kernels.triton import (
    attention,
    finite,
    gated,
    linear_cross_entropy,
    norm,
    random,
    rms_norm,
    rotary,
    update,
)

_MODULES = (attention, finite, gated, linear_cross_entropy, norm, random, rms_norm, rotary, update)

TABLE: dict[str, tuple[Kernel, ...]] = {
    op: (kernel,) for module in _MODULES for op, kernel in module.KERNELS.items()
}

__all__ = ["TABLE"]
