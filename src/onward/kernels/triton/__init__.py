"""Kernels in Triton, for CUDA devices, where PyTorch's operators would take many passes."""

from onward.kernels.kernel import Kernel
from onward.kernels.triton import attention, linear_cross_entropy, random

TABLE: dict[str, tuple[Kernel, ...]] = {
    op: (kernel,)
    for kernels in (attention.KERNELS, linear_cross_entropy.KERNELS, random.KERNELS)
    for op, kernel in kernels.items()
}

__all__ = ["TABLE"]
