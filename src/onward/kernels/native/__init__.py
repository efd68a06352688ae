"""Kernels in C++ with OpenMP for the CPU; behind each stands an aten kernel or the op's body."""

from onward.kernels.kernel import Kernel
from onward.kernels.native import (
    activation,
    attention,
    embedding,
    finite,
    norm,
    random,
    reduce,
    update,
)

TABLE: dict[str, tuple[Kernel, ...]] = {}
for _family in (random, attention, norm, activation, reduce, embedding, finite, update):
    for _op, _kernel in _family.KERNELS.items():
        TABLE[_op] = (*TABLE.get(_op, ()), _kernel)

__all__ = ["TABLE"]
