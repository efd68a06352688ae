"""Kernels in C++ with OpenMP for the CPU; each op has an aten kernel or its body to fall back on."""

from onward.kernels.kernel import Kernel
from onward.kernels.native import attention, random

TABLE: dict[str, tuple[Kernel, ...]] = {}
for _family in (random, attention):
    for _op, _kernel in _family.KERNELS.items():
        TABLE[_op] = (*TABLE.get(_op, ()), _kernel)

__all__ = ["TABLE"]
