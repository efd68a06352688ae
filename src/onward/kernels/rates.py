"""Rates of GPUs by name, from data sheets. No torch."""

from __future__ import annotations

from onward.kernels.target import Rates

# Peak rates of dense products and of memory, by a part of the GPU's name in CUDA; the first match
# counts. fp32 products use no TF32, as is PyTorch's default.
_GPUS: tuple[tuple[str, Rates], ...] = (
    # NVIDIA H200 data sheet, SXM
    ("H200", Rates(67e12, 4.8e12, low_flops_per_second=989e12)),
    # NVIDIA H100 data sheet, PCIe
    ("H100 PCIe", Rates(51e12, 2.0e12, low_flops_per_second=756e12)),
    # NVIDIA H100 data sheet, SXM
    ("H100", Rates(67e12, 3.35e12, low_flops_per_second=989e12)),
    # NVIDIA A100 data sheet, 80 GB
    ("A100", Rates(19.5e12, 2.0e12, low_flops_per_second=312e12)),
)
# NVIDIA T4 data sheet: about the slowest GPU used for training
UNKNOWN_GPU = Rates(8.1e12, 0.32e12, low_flops_per_second=65e12)


def rates_of_gpu(name: str) -> Rates:
    """The rates of a GPU by its name in CUDA; low rates for an unknown GPU."""
    return next((rates for part, rates in _GPUS if part in name), UNKNOWN_GPU)


__all__ = ["UNKNOWN_GPU", "rates_of_gpu"]
