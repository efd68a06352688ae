"""The seconds of work on a GPU, from its FLOPs and bytes and the rates of the data sheet.

A launch takes the larger of its compute time and its memory time, and a fixed gap. Each rate is a
fraction of the data sheet's peak; the fractions were fitted to eager PyTorch's steps on an H100 and
an H200 (`benchmarks/gpu_time.py` has each step beside its prediction).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onward.kernels.target import Rates

PRODUCTS, ATTENTION, MEMORY = "products", "attention", "memory"  # what bounds a launch

_SHARE_FP32, _SHARE_LOW, _SHARE_BYTES = 0.75, 0.6, 0.8  # of the peaks; TF32 takes the 16-bit one
_SHARE_ATTENTION_FP32, _SHARE_ATTENTION_LOW = 0.25, 0.13  # the products of attention, TF32 or not
_SHARE_ODD = 0.25  # of the speed of other 16-bit products: rows that do not start at 16 bytes
_ALIGNED = 8  # elements of 16 bits: 16 bytes
_TF32 = 0.5  # of the rate of low products: on NVIDIA's GPUs from Ampere on, and on gfx942
_GAP = 3e-6  # seconds from the end of a launch to the start of the next one

# Seconds of the host: what an operator costs in eager PyTorch with its gradient's bookkeeping, and
# one that only makes a view or that autocast inserts, on the Intel Xeon beside that H100.
_HOST, _HOST_LIGHT = 30e-6, 10e-6


@dataclass(frozen=True)
class LaunchWork:
    """The work of one launch. flops: of its products, without pairs that a causal mask hides.
    nbytes: read and written. low: whether it multiplies 16-bit numbers as such. attention: whether
    it is an attention kernel. rows: elements from one row to the next, of each matrix of a product;
    empty: no product of matrices."""

    flops: float = 0.0
    nbytes: float = 0.0
    low: bool = False
    attention: bool = False
    rows: tuple[int, ...] = ()


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
        odd = any(row % _ALIGNED for row in work.rows)
        return _SHARE_LOW * rates.low_flops_per_second * (_SHARE_ODD if odd else 1.0)
    if tf32:
        return _SHARE_LOW * _TF32 * rates.low_flops_per_second
    return _SHARE_FP32 * rates.flops_per_second


__all__ = ["DeviceSeconds", "LaunchWork", "device_seconds", "host_seconds"]
