"""Matrix products by the engine that was measured fastest for the shape on this machine."""

from onward.kernels.blas.product import KERNELS as TABLE

__all__ = ["TABLE"]
