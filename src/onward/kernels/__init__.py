"""Op -> code that writes into given buffers. One table; tests and benchmarks enumerate it."""

from onward.kernels.aten import TABLE as KERNELS
from onward.kernels.kernel import Kernel, Need, Use, torch_dtype

__all__ = ["KERNELS", "Kernel", "Need", "Use", "torch_dtype"]
