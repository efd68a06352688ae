"""Converts torch dtypes to a graph's element types, and refuses those that no graph has."""

from __future__ import annotations

import torch

from onward.errors import CaptureError
from onward.graph.types import DType, Type

_DTYPES: dict[torch.dtype, DType] = {
    torch.float32: DType.FLOAT,
    torch.float64: DType.DOUBLE,
    torch.int64: DType.INT64,
    torch.int32: DType.INT32,
    torch.uint8: DType.UINT8,
    torch.bool: DType.BOOL,
}


def dtype_of(dtype: torch.dtype, what: str, autocast: bool = False) -> DType:
    """Returns the element type in a captured graph for a torch dtype. what: names the tensor in a
    message. autocast: accept 16-bit floats, which are f32 in the graph until the cast policy
    applies. Raises CaptureError for a dtype that no graph has."""
    if dtype in (torch.float16, torch.bfloat16):
        if autocast:
            return DType.FLOAT
        raise CaptureError(
            f"{what} is of {dtype}, but weights and batches have to be torch.float32; fix: "
            'model.float() and float32 batches, with mixed_precision="bf16" or "fp16" for '
            "the arithmetic"
        )
    if dtype not in _DTYPES:
        raise CaptureError(f"{what} is of {dtype}, which is not supported; fix: {_other(dtype)}")
    return _DTYPES[dtype]


def _other(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "store torch.view_as_real of it, and call torch.view_as_complex in the forward"
    whole = not dtype.is_floating_point
    return "convert it to torch.int64" if whole else "convert it to torch.float32"


def promoted(a: Type | float, b: Type | float) -> DType:
    """Returns the element type that torch compares two tensors or numbers in (`torch.result_type`).
    Among tensors of one kind (bool, whole, floating) those with dims decide, before those without
    any, before numbers."""
    first, second = (x if not isinstance(x, Type) else _empty(x) for x in (a, b))
    return _DTYPES[torch.result_type(first, second)]


def _empty(type: Type) -> torch.Tensor:
    """A tensor without data that promotes others as one of this type does."""
    dtype = next(dtype for dtype, known in _DTYPES.items() if known == type.dtype)
    return torch.empty([0] * min(type.rank, 1), dtype=dtype, device="meta")


def to_type(tensor: torch.Tensor) -> Type:
    """Returns the type of a tensor, with its sizes as numbers. Raises CaptureError."""
    return Type(dtype_of(tensor.dtype, "a tensor of the model"), tuple(tensor.shape))


__all__ = ["dtype_of", "promoted", "to_type"]
