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
        return torch.from_numpy(_plain(np.asarray(array)))
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise OnwardError(
            f"{name} is a {type(array).__name__} that is no array ({error}); fix: numpy arrays"
        ) from error


def _plain(array: np.ndarray) -> np.ndarray:
    """The array in a form that torch takes: of this machine's byte order, writeable, with strides
    that are whole numbers of elements and not negative. A copy only where it has to be."""
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="), order="C")
    odd = any(stride < 0 or stride % max(array.itemsize, 1) for stride in array.strides)
    return array.copy() if odd or not array.flags.writeable or not array.flags.aligned else array


def as_dtype(x: torch.Tensor, dtype: DType, name: str) -> torch.Tensor:
    """The tensor in another dtype: whole numbers stay as they are, fp64 is rounded to fp32. Raises
    OnwardError where a number would become another one, or infinite."""
    want = torch_dtype(dtype)
    if x.dtype == want:
        return x
    both = x.dtype.is_floating_point, want.is_floating_point
    if both[0] != both[1] or torch.bool in (x.dtype, want):
        said = str(x.dtype).removeprefix("torch.")
        raise OnwardError(f"{name} is of {said}, and the model takes {dtype.name.lower()}")
    made = x.to(want)
    beyond = _beyond(x, made)
    if beyond is not None:
        info = torch.finfo(want) if want.is_floating_point else torch.iinfo(want)
        raise OnwardError(
            f"{name} holds {beyond}, and the model takes {dtype.name.lower()}, from {info.min} to "
            f"{info.max}; fix: numbers of that range"
        )
    return made


def _beyond(x: torch.Tensor, made: torch.Tensor) -> int | float | None:
    """A number of x that another dtype does not have, as which x was made; None where all are
    there."""
    if not x.numel():
        return None
    if not made.dtype.is_floating_point:
        info = torch.iinfo(made.dtype)
        array = array_of(x)  # numpy has the order of uint64, and exact numbers of Python
        ends = int(array.min()), int(array.max())
        return next((n for n in ends if not info.min <= n <= info.max), None)
    lost = torch.isfinite(x) & ~torch.isfinite(made)
    return float(x[lost][0]) if bool(lost.any()) else None


def array_of(x: torch.Tensor) -> np.ndarray:
    """The array of a tensor, on the CPU; it shares memory where it can."""
    return x.detach().cpu().numpy()


__all__ = ["Array", "array_of", "as_dtype", "tensor_of"]
