"""Calls of `op_cases` as kernels see them: rubbish in buffers, and what the op's body says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from op_cases import OpCase

from onward.graph.evaluate import evaluate
from onward.graph.graph import array_of, attributes, type_of
from onward.graph.types import DType, Type
from onward.kernels import Kernel, KernelArguments, KernelSpec, torch_dtype


@dataclass(frozen=True)
class Bound:
    """A call as a kernel sees it: its spec, and its inputs as tensors."""

    spec: KernelSpec
    inputs: list[torch.Tensor | None]
    want: list[np.ndarray]


def spec_of(case: OpCase, dtype: DType = DType.FLOAT) -> KernelSpec:
    node = next(iter(case.graph(dtype)))
    return KernelSpec(
        node.op_type, attributes(node),
        tuple(None if v is None else type_of(v) for v in node.inputs),
        tuple(type_of(v) for v in node.outputs),
    )  # fmt: skip


def bound(case: OpCase, dtype: DType = DType.FLOAT) -> Bound:
    graph = case.graph(dtype)
    feeds = case.feeds(dtype)
    node = next(iter(graph))
    inputs: list[torch.Tensor | None] = []
    for i, value in enumerate(node.inputs):
        array = None if value is None else feeds.get(f"x{i}", array_of(value))
        inputs.append(None if array is None else torch.tensor(array))
    spec = spec_of(case, dtype)
    return Bound(spec, inputs, [np.asarray(y) for y in evaluate(graph, feeds).values()])


def rubbish(type: Type) -> torch.Tensor:
    shape = [int(n) for n in type.shape]  # type: ignore[arg-type]
    dtype = torch_dtype(type.dtype)
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, dtype=dtype)
    return (
        torch.ones(shape, dtype=dtype) if dtype == torch.bool else torch.full(shape, 77).to(dtype)
    )


def raise_input_error(kernel: Kernel, args: KernelArguments) -> None:
    """What the flag of a launch says, as an executable raises it at the end of a step."""
    assert kernel.input_error is not None or not args.flag.any()
    if kernel.input_error is not None and args.flag.any():
        error = kernel.input_error(args, args.flag.tolist())
        if error is not None:
            raise error


def assert_equal(have: list[torch.Tensor], want: list[Any], **tolerance: Any) -> None:
    for y, expected in zip(have, want, strict=True):
        expected = np.asarray(expected)
        assert tuple(y.shape) == expected.shape
        if tolerance and y.is_floating_point():
            np.testing.assert_allclose(y.numpy(), expected, **tolerance)
        else:
            np.testing.assert_array_equal(y.numpy(), expected)
