"""Matrix products by the engine that was measured fastest for the shape on this machine."""

from onward.kernels.blas import head, product
from onward.kernels.kernel import Kernel

TABLE: dict[str, tuple[Kernel, ...]] = {**product.KERNELS, **head.KERNELS}

__all__ = ["TABLE"]
