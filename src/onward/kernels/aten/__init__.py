"""Kernels by PyTorch's own `out=` operators: at least one for every op, on every device of
PyTorch."""

from onward.kernels.aten import (
    adasum,
    batch_norm,
    conv,
    ctc,
    data,
    elementwise,
    group_norm,
    grouped,
    linear_cross_entropy,
    loss,
    norm,
    pool,
    product,
    random,
    recurrent,
    reduce,
    update,
    update_low,
)
from onward.kernels.kernel import Kernel

TABLE: dict[str, tuple[Kernel, ...]] = {
    op: kernels if isinstance(kernels, tuple) else (kernels,)
    for family in (
        elementwise,
        data,
        reduce,
        conv,
        pool,
        group_norm,
        grouped,
        product,
        norm,
        batch_norm,
        loss,
        ctc,
        linear_cross_entropy,
        random,
        recurrent,
        update,
        update_low,
        adasum,
    )
    for op, kernels in family.KERNELS.items()
}

__all__ = ["TABLE"]
