"""The seconds of work on a GPU, from its FLOPs and bytes and the rates of the data sheet.

A launch takes the larger of two times, that of its products and that of its bytes, and the gap to
the next launch. The shares of the data sheet's rates are rounded from steps of eager PyTorch on an
H100 and an H200 (`benchmarks/gpu_time.py` has each step beside its prediction).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onward.kernels.target import Rates

PRODUCTS, ATTENTION, MEMORY = "products", "attention", "memory"  # what bounds a launch

_SHARE_FP32, _SHARE_LOW, _SHARE_BYTES = 0.75, 0.6, 0.8  # of the peaks; TF32 reaches that of low
_SHARE_ATTENTION_FP32, _SHARE_ATTENTION_LOW = 0.25, 0.13  # scores and what is taken of them
_SHARE_ODD = 0.25  # of the speed of other low products: sizes that are no multiples of _ALIGNED
_ALIGNED = 8  # numbers of 16 bits, which are 16 bytes
_TF32 = 0.5  # of the rate of low products: on NVIDIA's GPUs from Ampere on, and on gfx942
_GAP = 3e-6  # seconds from the end of a launch to the start of the next one

# Seconds of the host: what an operator costs in eager PyTorch with its gradient's bookkeeping, and
# one that only makes a view or that autocast inserts, on the Intel Xeon beside that H100.
_HOST, _HOST_LIGHT = 30e-6, 10e-6


@dataclass(frozen=True)
class LaunchWork:
    """The work of one launch. flops: of its products, without pairs that a causal mask hides.
    nbytes: read and written. low: whether products are of 16-bit numbers. attention: whether
    they are attention's. sizes: m, n and k of a product whose operands are matrices; empty: none or
    unknown."""

    flops: float = 0.0
    nbytes: float = 0.0
    low: bool = False
    attention: bool = False
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class DeviceSeconds:
    """The seconds of launches on a GPU, by what bounds them. launches: their number."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    launches: int = 0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.memory


def device_seconds(work: Iterable[LaunchWork], rates: Rates, tf32: bool) -> DeviceSeconds:
    """The seconds of launches, one after another. rates: of the data sheet. tf32: whether products
    of fp32 are computed in TF32."""
    kinds = dict.fromkeys((PRODUCTS, ATTENTION, MEMORY), 0.0)
    launches = 0
    for each in work:
        arithmetic = each.flops / _rate(each, rates, tf32)
        moved = each.nbytes / (_SHARE_BYTES * rates.bytes_per_second)
        kind = ATTENTION if each.attention else PRODUCTS if arithmetic > moved else MEMORY
        kinds[kind] += max(arithmetic, moved) + _GAP
        launches += 1
    return DeviceSeconds(**kinds, launches=launches)


def host_seconds(operators: int, light: int) -> float:
    """The seconds that eager PyTorch's host takes to launch a step. operators: with kernels.
    light: those that only make views, and casts of autocast."""
    return operators * _HOST + light * _HOST_LIGHT


def _rate(work: LaunchWork, rates: Rates, tf32: bool) -> float:
    if work.attention:
        low = _SHARE_ATTENTION_LOW * rates.low_flops_per_second
        return low if work.low else _SHARE_ATTENTION_FP32 * rates.flops_per_second
    if work.low:
        odd = any(size % _ALIGNED for size in work.sizes)
        return _SHARE_LOW * rates.low_flops_per_second * (_SHARE_ODD if odd else 1.0)
    if tf32:
        return _SHARE_LOW * _TF32 * rates.low_flops_per_second
    return _SHARE_FP32 * rates.flops_per_second


__all__ = ["DeviceSeconds", "LaunchWork", "device_seconds", "host_seconds"]
