"""Kernels in Triton, for CUDA devices, where PyTorch's operators would take many passes."""

from onward.kernels.kernel import Kernel
from onward.kernels.triton import random

TABLE: dict[str, tuple[Kernel, ...]] = {op: (kernel,) for op, kernel in random.KERNELS.items()}

__all__ = ["TABLE"]
