"""Op -> code that writes into given buffers: one table, which tests and benchmarks enumerate.

In: a `KernelSpec` and a `Target`. Out: from `kernel_for` the kernel of the call, or every reason
why there is none. It is the only function that chooses.
Imports: graph.
"""

from dataclasses import dataclass

from onward.graph.registry import meeting
from onward.kernels.aten import TABLE as ATEN
from onward.kernels.blas import TABLE as BLAS
from onward.kernels.blas.choice import forced as forced_engine
from onward.kernels.collective import TABLE as COLLECTIVE
from onward.kernels.collective import RankGroups
from onward.kernels.gpus import GPUS, Gpu, gpu_called
from onward.kernels.host import host
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, torch_dtype
from onward.kernels.native import TABLE as NATIVE
from onward.kernels.region import TABLE as REGION
from onward.kernels.region import EagerPart, RegionRuns, running
from onward.kernels.target import Rates, Target
from onward.kernels.triton import TABLE as TRITON

# The first kernel that applies is taken; the one registered last comes first.
KERNELS: dict[str, tuple[Kernel, ...]] = {}


def register(op: str, kernel: Kernel) -> None:
    """Puts a kernel before the others of its op; registering the same kernel again does nothing.
    Raises ValueError, with both places, where another one of the op has its name."""
    held = KERNELS.get(op, ())
    if any(k is kernel for k in held):
        return
    for other in held:
        if other.name == kernel.name:
            raise meeting(f"the kernel {kernel.name} of {op}", other.bind, kernel.bind)
    KERNELS[op] = (kernel, *held)


# measured BLAS engines before native kernels, and these before aten's
_TABLES = (BLAS, NATIVE, TRITON, REGION, COLLECTIVE, ATEN)
for _op in sorted({op for table in _TABLES for op in table}):
    for _kernel in reversed([k for table in _TABLES for k in table.get(_op, ())]):
        register(_op, _kernel)


@dataclass(frozen=True)
class Refusal:
    """The reasons why no kernel accepts a call: one for each kernel of its op, after the kernel's
    name."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.reasons)


def kernel_for(spec: KernelSpec, target: Target) -> Kernel | Refusal:
    """The first kernel that applies to a call on a target; a Refusal where there is none.

    Types of `spec` may have symbolic sizes. Measurements by size are then ignored: they decide
    which kernel to take, never whether there is one.
    """
    reasons: list[str] = []
    for kernel in KERNELS.get(spec.op, ()):
        reason = kernel.where(target) or kernel.unsupported(spec)
        if reason is None:
            faster = kernel.faster(spec) if spec.is_static else None
            if faster is None:
                return kernel
            reason = f"{faster} was measured faster"
        reasons.append(f"{kernel.name}: {reason}")
    return Refusal(tuple(reasons) or ("not in the kernel table",))


__all__ = [
    "ATEN",
    "GPUS",
    "KERNELS",
    "NATIVE",
    "TRITON",
    "EagerPart",
    "Gpu",
    "Kernel",
    "KernelArguments",
    "KernelSpec",
    "RankGroups",
    "Rates",
    "Refusal",
    "RegionRuns",
    "Target",
    "forced_engine",
    "gpu_called",
    "host",
    "kernel_for",
    "register",
    "running",
    "torch_dtype",
]
