"""Calls of convolutions and pools that onnx's evaluator has wrong: the oracle is onnxruntime."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from kernel_calls import assert_equal, rubbish, spec_of
from op_cases import Input, OpCase, r
from test_kernels import TOLERANCE
from torch.profiler import ProfilerActivity, profile

from onward.graph.file import to_proto
from onward.graph.types import DType
from onward.kernels import KERNELS, Kernel, KernelArguments


def case_of(op: str, *inputs: Input, **attrs: Any) -> OpCase:
    return OpCase(op, inputs, attrs, f"{op} {attrs}")


def of_aten(op: str) -> list[Kernel]:
    """The kernels that call aten; depthwise kernels are tested in test_depthwise_conv.py."""
    return [k for k in KERNELS[op] if k.name.startswith("aten.")]


CASES = [
    case_of(
        "ConvTranspose", r(2, 6, 7, 6), r(6, 2, 2, 3), dilations=[2, 1], strides=[3, 2], group=2
    ),
    case_of("ConvTranspose", r(1, 4, 5, 5), r(4, 1, 3, 3), r(4), pads=[1] * 4, group=4),
    case_of(
        "ConvTranspose", r(2, 4, 3), r(4, 3, 3), r(6), strides=[2], output_padding=[1], group=2
    ),
    case_of("ConvTranspose", r(3, 4, 2, 3, 2), r(4, 1, 2, 2, 1), r(2), strides=[2, 1, 1], group=2),
    case_of("MaxPool", r(2, 3, 9), kernel_shape=[2]),
    case_of("MaxPool", r(2, 3, 9), kernel_shape=[3], strides=[2], pads=[1, 1], dilations=[2]),
    case_of("MaxPool", r(2, 2, 3, 3, 2), kernel_shape=[2, 1, 2]),
    case_of(
        "MaxPool", r(1, 2, 4, 5, 3), kernel_shape=[2, 3, 3], strides=[2] * 3, pads=[0, 1, 1] * 2
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_onnxruntimes(case: OpCase) -> None:
    feeds, spec = case.feeds(), spec_of(case)
    session = ort.InferenceSession(to_proto(case.graph()).SerializeToString())
    want = [np.asarray(y) for y in session.run(None, feeds)]
    for kernel in of_aten(case.op):
        assert kernel.unsupported(spec) is None
        outputs = [rubbish(t) for t in spec.outputs]
        inputs: list[torch.Tensor | None] = [torch.tensor(x) for x in feeds.values()]
        with torch.no_grad():
            kernel.bind(KernelArguments(spec.attrs, inputs, outputs, []))()
        assert_equal(outputs, want, **TOLERANCE)


def outstanding(run: Any) -> int:
    """The most bytes of the CPU allocator that are in use at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    return max([0, *itertools.accumulate(nbytes for _, nbytes in events)])


def window(kernel: int, stride: int, pad: int, group: int) -> dict[str, Any]:
    return {
        "strides": [stride] * 2,
        "pads": [pad] * 4,
        "group": group,
        "kernel_shape": [kernel] * 2,
    }


SIZES = (  # samples, channels, results, width, kernel, stride, pad, groups
    (8, 64, 64, 32, 3, 1, 1, 1), (1, 64, 64, 32, 3, 1, 1, 1), (4, 64, 128, 32, 3, 2, 1, 1),
    (8, 64, 64, 16, 3, 1, 1, 64), (4, 3, 64, 64, 7, 2, 3, 1), (8, 128, 64, 16, 1, 1, 0, 1),
    (8, 3, 192, 64, 8, 8, 0, 1), (2, 1, 1, 64, 3, 1, 1, 1), (4, 32, 32, 16, 5, 1, 2, 4),
)  # fmt: skip


def large(op: str, n: int, c: int, m: int, size: int, kernel: int, *rest: int) -> OpCase:
    stride, pad, group = rest
    attrs, room = window(kernel, *rest), size + 2 * pad - kernel
    places = room // stride + 1
    image, result = r(n, c, size, size), r(n, m, places, places)
    weight = r(m, c // group, kernel, kernel)
    match op:
        case "Conv":
            return case_of(op, image, weight, r(m), **attrs)
        case "ConvTranspose":
            attrs["output_padding"] = [room % stride] * 2
            return case_of(op, result, weight, **attrs)
        case _:
            return case_of(op, result, image, **attrs)


@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.DOUBLE], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "ConvWeightGrad"])
def test_no_more_is_allocated_than_said(op: str, sizes: tuple[int, ...], dtype: DType) -> None:
    case = large(op, *sizes)
    spec = spec_of(case, dtype)
    for kernel in of_aten(op):
        outputs = [rubbish(t) for t in spec.outputs]
        inputs: list[torch.Tensor | None] = [torch.tensor(x) for x in case.feeds(dtype).values()]
        with torch.no_grad():
            launch = kernel.bind(KernelArguments(spec.attrs, inputs, outputs, []))
            launch()
            assert outstanding(launch) <= kernel.workspace(spec)
