"""Targets and types that Triton's kernels take."""

from __future__ import annotations

from collections.abc import Iterable

from onward.graph.types import LOW, DType, Type
from onward.kernels.target import LEAST_OF_TRITON, Target, takes_triton


def where(target: Target) -> str | None:
    """`Kernel.where` of every Triton kernel."""
    if target.device != "cuda":
        return f"not on {target.device}"
    if not takes_triton(target.capability):
        least = ".".join(map(str, LEAST_OF_TRITON))
        return f"Triton supports GPUs of compute capability {least} and later"
    return None if target.triton else "Triton is not installed"


def other_types(types: Iterable[Type | None]) -> str | None:
    """The reason against tensors that are not of f32, bf16 or fp16; None where all are."""
    for t in types:
        if t is not None and t.dtype not in (DType.FLOAT, *LOW):
            return f"{t.dtype.name.lower()} tensors"
    return None


__all__ = ["other_types", "where"]
