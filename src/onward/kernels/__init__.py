"""Op -> code that writes into given buffers. One table; tests and benchmarks enumerate it."""

from onward.kernels.aten import TABLE as ATEN
from onward.kernels.blas import TABLE as BLAS
from onward.kernels.blas.choice import forced as forced_engine
from onward.kernels.kernel import Kernel, Need, Use, torch_dtype
from onward.kernels.native import TABLE as NATIVE

# The first that applies is taken: measured engines, then native, then aten.
KERNELS: dict[str, tuple[Kernel, ...]] = {
    op: (*BLAS.get(op, ()), *NATIVE.get(op, ()), *ATEN.get(op, ()))
    for op in sorted({*BLAS, *NATIVE, *ATEN})
}


def serves(op: str, device: str) -> bool:
    """Whether some kernel of `op` runs on this kind of device ("cpu", "cuda")."""
    return any(kernel.where(device) is None for kernel in KERNELS.get(op, ()))


__all__ = [
    "ATEN",
    "KERNELS",
    "NATIVE",
    "Kernel",
    "Need",
    "Use",
    "forced_engine",
    "serves",
    "torch_dtype",
]
