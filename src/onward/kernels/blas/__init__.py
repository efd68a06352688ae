"""Matrix products by the engine that was measured fastest for the shape on this machine."""

from onward.kernels.blas import linear_cross_entropy, low_head, low_product, product
from onward.kernels.kernel import Kernel

_MODULES = (product, low_product, linear_cross_entropy, low_head)
TABLE: dict[str, tuple[Kernel, ...]] = {
    op: tuple(kernel for module in _MODULES for kernel in module.KERNELS.get(op, ()))
    for op in sorted({op for module in _MODULES for op in module.KERNELS})
}

__all__ = ["TABLE"]
