"""GPUs by name: rates and memory from data sheets, for plans and predictions. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onward.errors import check_names
from onward.kernels.target import Rates, Target, takes_triton


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet has it. name: as users write it. part: of its name in CUDA or ROCm.
    memory: bytes. rates: peaks of dense products and of memory; fp32 products use no TF32, as is
    PyTorch's default. capability: CUDA's compute capability; of ROCm the architecture."""

    name: str
    part: str
    memory: int
    rates: Rates
    capability: str | tuple[int, int]

    @property
    def target(self) -> Target:
        """The device as kernels and cost estimates see it."""
        # bf16 products came with Ampere (8, 0), and AMD's data centre GPUs have them
        bf16 = isinstance(self.capability, str) or self.capability >= (8, 0)
        return Target(
            "cuda", triton=takes_triton(self.capability), multiplies_bf16=bf16,
            multiplies_fp16=True, rates=self.rates, capability=self.capability,
        )  # fmt: skip


_GB = 10**9

# The first whose part is among the words of a device's name counts.
GPUS: tuple[Gpu, ...] = (
    # NVIDIA HGX B200 data sheet, an eighth of its rates
    Gpu("B200", "B200", 180 * _GB, Rates(75e12, 7.7e12, low_flops_per_second=2250e12), (10, 0)),
    # NVIDIA GH200 data sheet, 96 GB
    Gpu("GH200", "GH200", 96 * _GB, Rates(67e12, 4.0e12, low_flops_per_second=989e12), (9, 0)),
    # NVIDIA H200 data sheet, SXM
    Gpu("H200", "H200", 141 * _GB, Rates(67e12, 4.8e12, low_flops_per_second=989e12), (9, 0)),
    # NVIDIA H100 data sheet, PCIe
    Gpu("H100-PCIe", "H100 PCIe", 80 * _GB,
        Rates(51e12, 2.0e12, low_flops_per_second=756e12), (9, 0)),
    # NVIDIA H100 data sheet, SXM
    Gpu("H100", "H100", 80 * _GB, Rates(67e12, 3.35e12, low_flops_per_second=989e12), (9, 0)),
    # NVIDIA A100 data sheet, 80 GB
    Gpu("A100", "A100", 80 * _GB, Rates(19.5e12, 2.0e12, low_flops_per_second=312e12), (8, 0)),
    # NVIDIA A10 data sheet
    Gpu("A10", "A10", 24 * _GB, Rates(31.2e12, 0.6e12, low_flops_per_second=125e12), (8, 6)),
    # NVIDIA L40S data sheet
    Gpu("L40S", "L40S", 48 * _GB, Rates(91.6e12, 0.864e12, low_flops_per_second=362e12), (8, 9)),
    # NVIDIA Ada architecture white paper, sums of products in fp32
    Gpu("RTX-4090", "RTX 4090", 24 * _GB,
        Rates(82.6e12, 1.008e12, low_flops_per_second=165e12), (8, 9)),
    # NVIDIA L4 data sheet
    Gpu("L4", "L4", 24 * _GB, Rates(30.3e12, 0.3e12, low_flops_per_second=121e12), (8, 9)),
    # AMD Instinct MI300X data sheet
    Gpu("MI300X", "MI300X", 192 * _GB,
        Rates(163.4e12, 5.3e12, low_flops_per_second=1307e12), "gfx942"),
    # NVIDIA V100 data sheet, SXM2, 32 GB
    Gpu("V100", "V100", 32 * _GB, Rates(15.7e12, 0.9e12, low_flops_per_second=125e12), (7, 0)),
    # NVIDIA T4 data sheet
    Gpu("T4", "Tesla T4", 16 * _GB, Rates(8.1e12, 0.32e12, low_flops_per_second=65e12), (7, 5)),
)  # fmt: skip
UNKNOWN_GPU = GPUS[-1].rates  # a T4's, about the slowest GPU used for training


def gpu_of(name: str) -> Gpu | None:
    """The GPU with this name in CUDA or ROCm; None where Onward does not know it."""
    return next((gpu for gpu in GPUS if re.search(rf"\b{gpu.part}\b", name)), None)


def rates_of_gpu(name: str) -> Rates:
    """The rates of a GPU by its name in CUDA or ROCm; those of a T4 for an unknown GPU."""
    found = gpu_of(name)
    return UNKNOWN_GPU if found is None else found.rates


def gpu_called(name: str) -> Gpu:
    """The GPU that a user names, such as "h100". Raises OnwardError for an unknown name."""
    known = {gpu.name.lower(): gpu for gpu in GPUS}
    asked = name.strip().lower()
    check_names("gpu", "GPU", [asked], known)
    return known[asked]


__all__ = ["GPUS", "UNKNOWN_GPU", "Gpu", "gpu_called", "gpu_of", "rates_of_gpu"]
