"""torch's element types as a graph's, and which are refused."""

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
    """The element type that a captured graph has for torch's. autocast: whether the trace has
    tensors that autocast made, which are f32 until the policy writes its casts. Raises
    CaptureError for a dtype that no graph has, naming `what` is of it."""
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


def to_type(tensor: torch.Tensor) -> Type:
    """The type of a concrete tensor."""
    return Type(dtype_of(tensor.dtype, "a tensor of the model"), tuple(tensor.shape))


__all__ = ["dtype_of", "to_type"]
