"""Rates of GPUs by their names: a table of data sheets. No torch."""

from __future__ import annotations

from onward.kernels.target import Rates

# Peaks of dense products and of memory, by a part of the name that CUDA gives a GPU; the first
# that fits. Products of fp32 are fp32 throughout, as PyTorch has them unless it is told otherwise.
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
# NVIDIA T4 data sheet: about the slowest GPU that models are trained on
UNKNOWN_GPU = Rates(8.1e12, 0.32e12, low_flops_per_second=65e12)


def rates_of_gpu(name: str) -> Rates:
    """The rates of a GPU by the name that CUDA gives it; of one that is not in the table, low
    ones."""
    return next((rates for part, rates in _GPUS if part in name), UNKNOWN_GPU)


__all__ = ["UNKNOWN_GPU", "rates_of_gpu"]
