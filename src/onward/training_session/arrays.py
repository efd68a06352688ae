"""Arrays of the caller as tensors, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from onward.errors import OnwardError
from onward.graph.types import DType
from onward.kernels import torch_dtype

Array = Any  # numpy's, or anything with __dlpack__


def tensor_of(array: Array, name: str) -> torch.Tensor:
    """A tensor of an array, without a copy where that can be. Raises OnwardError for no array."""
    if isinstance(array, torch.Tensor):
        return array.detach()
    try:
        if not isinstance(array, np.ndarray) and hasattr(array, "__dlpack__"):
            return torch.from_dlpack(array)
        made = np.asarray(array)
        return torch.from_numpy(made if made.flags.writeable else made.copy())
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise OnwardError(
            f"{name} is a {type(array).__name__} that is no array ({error}); fix: numpy arrays"
        ) from error


def as_dtype(x: torch.Tensor, dtype: DType, name: str) -> torch.Tensor:
    """The tensor in another dtype: whole numbers stay as they are, fp64 is rounded to fp32. Raises
    OnwardError where a number would become another one."""
    want = torch_dtype(dtype)
    if x.dtype == want:
        return x
    both = x.dtype.is_floating_point, want.is_floating_point
    if both[0] != both[1] or torch.bool in (x.dtype, want):
        said = str(x.dtype).removeprefix("torch.")
        raise OnwardError(f"{name} is of {said}, and the model takes {dtype.name.lower()}")
    made = x.to(want)
    if not want.is_floating_point and not torch.equal(made.to(x.dtype), x):
        raise OnwardError(f"{name} holds numbers that {dtype.name.lower()} does not have")
    return made


def array_of(x: torch.Tensor) -> np.ndarray:
    """The array of a tensor, on the CPU; it shares memory where it can."""
    return x.detach().cpu().numpy()


__all__ = ["Array", "array_of", "as_dtype", "tensor_of"]
