"""Matrix products by the engine that was measured fastest for the shape on this machine."""

from onward.kernels.blas import linear_cross_entropy, product
from onward.kernels.kernel import Kernel

TABLE: dict[str, tuple[Kernel, ...]] = {**product.KERNELS, **linear_cross_entropy.KERNELS}

__all__ = ["TABLE"]
