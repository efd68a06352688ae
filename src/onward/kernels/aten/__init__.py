"""Kernels by PyTorch's own `out=` operators: one for every op, on every device PyTorch knows."""

from onward.kernels.aten import (
    data,
    elementwise,
    linear_cross_entropy,
    loss,
    norm,
    product,
    random,
    reduce,
    update,
)
from onward.kernels.kernel import Kernel

TABLE: dict[str, tuple[Kernel, ...]] = {
    op: (kernel,)
    for family in (
        elementwise,
        data,
        reduce,
        product,
        norm,
        loss,
        linear_cross_entropy,
        random,
        update,
    )
    for op, kernel in family.KERNELS.items()
}

__all__ = ["TABLE"]
