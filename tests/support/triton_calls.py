"""Calls of Triton kernels on tensors, for the checks by Triton's interpreter."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from kernel_calls import rubbish

from onward.graph.types import DType, Type
from onward.kernels import TRITON, KernelArguments, KernelSpec, torch_dtype

# The interpreter keeps bf16 as integers and computes wrong numbers with it, without an error: it
# runs on a device only.
DTYPES = (DType.FLOAT, DType.FLOAT16)
TOLERANCE = {"rtol": 1e-5, "atol": 5e-6}  # as of test_gpu_kernels.py
_TYPES = {torch_dtype(d): d for d in (*DTYPES, DType.INT64, DType.INT32, DType.BOOL)}
_AROUND = 64  # numbers around each scratch that nothing may write


@contextmanager
def maxima_of_devices() -> Iterator[None]:
    """Within it, the interpreter's maximum of a number and NaN is the number, as on devices; else
    it is NaN."""
    from triton.runtime.interpreter import (  # pyright: ignore[reportMissingImports]
        InterpreterBuilder,
    )

    def maximum(builder: Any, a: Any, b: Any) -> Any:
        return builder.binary_op(a, b, np.fmax)

    with patch.object(InterpreterBuilder, "create_maxnumf", maximum), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of rows of NaN alone
        yield


def type_of(x: torch.Tensor | None) -> Type | None:
    return None if x is None else Type(_TYPES[x.dtype], tuple(x.shape))


def near(
    name: str, have: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Asserts that a tensor is as near as its precision allows, by norm. dtype: that of the numbers
    it is computed from, where it is not the tensor's own."""
    truth = truth.double()
    unit = 2e-6 if (dtype or have.dtype) == torch.float32 else 2e-3
    distance, norm = float((have.double() - truth).norm()), float(truth.norm())
    # where the truth is 0, as of a query with one key, terms of size 1 cancel
    share = 0.02 if norm > 1e-9 else 1.0
    allowed = unit * (norm + share * have.numel() ** 0.5)
    assert distance <= allowed, f"{name}: {distance:.3e}, allowed {allowed:.3e}"


def launch(
    op: str, attrs: dict[str, Any], inputs: list[torch.Tensor | None], outputs: list[torch.Tensor]
) -> torch.Tensor:
    """Launches the kernel of an op; nothing around its scratch may be written. Returns its flag.
    An output may be one of the inputs."""
    (kernel,) = TRITON[op]
    types = tuple(type_of(x) for x in inputs)
    spec = KernelSpec(op, attrs, types, tuple(t for y in outputs if (t := type_of(y)) is not None))
    assert kernel.unsupported(spec) is None, kernel.unsupported(spec)
    rooms, scratch = [], []
    for t in kernel.scratch(spec):
        inner = rubbish(t)
        room = torch.full((inner.numel() + 2 * _AROUND,), 1).to(inner.dtype)
        room[_AROUND : _AROUND + inner.numel()] = inner.flatten()
        rooms.append(room)
        scratch.append(room[_AROUND : _AROUND + inner.numel()].view(inner.shape))
    for y in outputs:
        if not any(y is x for x in inputs):
            y.fill_(torch.nan)
    args = KernelArguments(attrs, inputs, outputs, scratch)
    kernel.bind(args)()
    for room in rooms:
        assert (room[:_AROUND] == 1).all() and (room[-_AROUND:] == 1).all(), "out of the scratch"
    return args.flag
