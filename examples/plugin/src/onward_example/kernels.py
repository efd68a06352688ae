"""The kernels of kernels.cpp, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from onward.extend import DType, Kernel, KernelArguments, KernelSpec, Launch, Target


@cache
def library() -> ctypes.CDLL | None:
    """What setup.py compiled; None where there was no compiler."""
    found = sorted(Path(__file__).parent.glob("_kernels*.so"))
    return ctypes.CDLL(str(found[0])) if found else None


def _where(target: Target) -> str | None:
    if target.device != "cpu":
        return f"not on {target.device}"
    return None if library() is not None else "installed without a C++ compiler"


def _unsupported(spec: KernelSpec) -> str | None:
    strange = [t for t in spec.inputs if t is not None and t.dtype != DType.FLOAT]
    return f"{strange[0].dtype.name.lower()} tensors" if strange else None


def _calling(name: str) -> Callable[[KernelArguments], Launch]:
    """Binds `name(inputs..., y, n)`: addresses and the count are converted once, not per step."""

    def bind(args: KernelArguments) -> Launch:
        c = library()
        assert c is not None
        function = c[name]
        function.restype = None
        tensors = [*args.inputs, args.y]
        addresses = [ctypes.c_void_p(t.data_ptr()) for t in tensors if t is not None]
        return partial(function, *addresses, ctypes.c_int64(args.y.numel()))

    return bind


SQUARED_RELU = Kernel(
    "example.squared_relu",
    _calling("squared_relu"),
    unsupported=_unsupported,
    where=_where,
    inplace=((0, 0),),
    contiguous=None,
)

SQUARED_RELU_GRAD = Kernel(
    "example.squared_relu_grad",
    _calling("squared_relu_grad"),
    unsupported=_unsupported,
    where=_where,
    inplace=((0, 0), (0, 1)),
    contiguous=None,
)
