"""Target: a device, for choosing kernels and estimating costs. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

NO_LIBRARY = "none"
LEAST_OF_TRITON = (8, 0)  # compute capability (https://github.com/triton-lang/triton#compatibility)


@dataclass(frozen=True)
class Rates:
    """The approximate speed of a machine, for ranking what is cheap to recompute.

    Only ratios matter. flops_per_second: of fp32 products. low_flops_per_second: of fp16 and bf16
    products. The defaults were read off benchmark steps on two AVX2 cores of an AMD EPYC
    (2026-11-21, `docs/log.md`): matrix products reach 140-170 GFLOP/s; elementwise loops and copies
    about 20 GB/s once their operands do not fit in a cache.
    """

    flops_per_second: float = 150e9
    bytes_per_second: float = 20e9
    launch_seconds: float = 2e-6
    low_flops_per_second: float = 150e9


@dataclass(frozen=True)
class Target:
    """A machine's device as kernels and cost estimates see it.

    device: "cpu" or "cuda". instructions: of the native library, "avx512", "avx2" or "plain";
    "none" without the library and on devices that it does not support. triton: whether Triton
    supports the device here. dtype: of products. multiplies_bf16: whether the processor has bf16
    products (AVX512-BF16, AMX, tensor cores), so that bf16 pays off. multiplies_fp16: whether it
    has fp16 products (AVX512-FP16, AMX-FP16, tensor cores). capability: a GPU's compute
    capability, such as (9, 0), or of an AMD one its architecture, such as "gfx942"; a CPU's widest
    instruction set that PyTorch uses, such as "AVX2"; "" where unknown.
    """

    device: str = "cpu"
    instructions: str = NO_LIBRARY
    triton: bool = False
    dtype: str = "float32"
    multiplies_bf16: bool = False
    multiplies_fp16: bool = False
    rates: Rates = Rates()
    capability: str | tuple[int, int] = ""

    @property
    def records(self) -> bool:
        """Whether launches of unchanged sizes are recorded and replayed without the host."""
        return self.device == "cuda"

    @property
    def has_library(self) -> bool:
        """Whether the native kernels can run."""
        return self.instructions != NO_LIBRARY


def takes_triton(capability: str | tuple[int, int]) -> bool:
    """Whether Triton compiles for a GPU of this `Target.capability`; yes where it is unknown."""
    return isinstance(capability, str) or capability >= LEAST_OF_TRITON


__all__ = ["LEAST_OF_TRITON", "NO_LIBRARY", "Rates", "Target", "takes_triton"]
