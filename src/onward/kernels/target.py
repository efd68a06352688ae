"""Target: a device, for choosing kernels and estimating costs. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

NO_LIBRARY = "none"


@dataclass(frozen=True)
class Rates:
    """How fast a machine is, roughly: enough to rank what is cheap to compute again.

    Only ratios matter. flops_per_second: of products in fp32; low_flops_per_second: of those in
    fp16 and bf16. The defaults were read off benchmark steps on two AVX2 cores of an AMD EPYC
    (2026-11-21, `docs/log.md`): matrix products reach 140-170 GFLOP/s, elementwise loops and copies
    about 20 GB/s once their operands do not fit a cache.
    """

    flops_per_second: float = 150e9
    bytes_per_second: float = 20e9
    launch_seconds: float = 2e-6
    low_flops_per_second: float = 150e9


@dataclass(frozen=True)
class Target:
    """A machine's device as kernels and costs see it.

    device: its kind, "cpu" or "cuda". instructions: of the native library, "avx512", "avx2" or
    "plain"; "none" without one, as on devices it is not for. triton: whether Triton is there for
    the device. dtype: what products are computed in. multiplies_bf16: whether the processor itself
    multiplies bfloat16 (AVX512-BF16, AMX, a GPU's tensor cores), so that it pays. capability: what
    the processor can do, of a GPU its compute capability, (9, 0), of a CPU the widest instruction
    set that PyTorch uses, "AVX2"; "" where it is not known.
    """

    device: str = "cpu"
    instructions: str = NO_LIBRARY
    triton: bool = False
    dtype: str = "float32"
    multiplies_bf16: bool = False
    rates: Rates = Rates()
    capability: str | tuple[int, int] = ""

    @property
    def has_library(self) -> bool:
        """Whether the native kernels can run."""
        return self.instructions != NO_LIBRARY


__all__ = ["NO_LIBRARY", "Rates", "Target"]
