"""Filters of each channel over one dim, forward and backward, against PyTorch in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_calls import rubbish, spec_of
from op_cases import OpCase, r

from onward.kernels import KERNELS, Kernel, KernelArguments

# Lengths below, at and beyond blocks of 16 and 64; taps from one to more than a short row has.
GRID = [
    (length, taps, dilation, pads)
    for length, taps, dilation in itertools.product(
        (1, 3, 16, 67, 200), (1, 2, 4, 31), (1, 2)
    )
    for pads in ((0, 0), (taps - 1, taps - 1), ((taps - 1) * dilation, 0), (1, 5))
    if length + sum(pads) > (taps - 1) * dilation
]  # fmt: skip


def native(op: str) -> Kernel:
    found = [k for k in KERNELS[op] if k.name.startswith("native.depthwise_conv")]
    if not found:
        pytest.skip("no native kernels here")
    return found[0]


def computed(case: OpCase, *inputs: torch.Tensor) -> torch.Tensor:
    spec, kernel = spec_of(case), native(case.op)
    assert kernel.unsupported(spec) is None
    outputs = [rubbish(t) for t in spec.outputs]
    kernel.bind(KernelArguments(spec.attrs, [*inputs], outputs, []))()
    return outputs[0]


@pytest.mark.sample(20)
@pytest.mark.parametrize(("length", "taps", "dilation", "pads"), GRID)
def test_filters_and_their_gradients_are_torchs(
    length: int, taps: int, dilation: int, pads: tuple[int, int]
) -> None:
    samples, channels = 2, 3
    g = torch.Generator().manual_seed(length * taps)
    x = torch.randn(samples, channels, length, generator=g)
    w, bias = torch.randn(channels, 1, taps, generator=g), torch.randn(channels, generator=g)
    exact = [t.double().requires_grad_() for t in (x, w, bias)]
    padded = F.pad(exact[0], pads)
    y = F.conv1d(padded, exact[1], exact[2], dilation=dilation, groups=channels)
    dy = torch.randn(y.shape, generator=g)
    dx, dw, _ = torch.autograd.grad(y, exact, dy.double())
    attrs: dict[str, Any] = {"dilations": [dilation], "pads": [*pads], "group": channels}

    def check(found: torch.Tensor, want: torch.Tensor) -> None:
        exactly = want.detach().numpy()
        loose = 2e-6 * float(np.abs(exactly).max() + 1)
        np.testing.assert_allclose(found.numpy(), exactly, rtol=1e-5, atol=loose)

    call = OpCase("Conv", (r(*x.shape), r(*w.shape), r(channels)), attrs, "Conv")
    check(computed(call, x, w, bias), y)
    rest = length - (y.shape[2] - 1 + (taps - 1) * dilation + 1 - sum(pads))
    more = {"output_padding": [rest]} if rest else {}
    call = OpCase("ConvTranspose", (r(*dy.shape), r(*w.shape)), {**attrs, **more}, "dx")
    check(computed(call, dy, w), dx)
    call = OpCase(
        "ConvWeightGrad", (r(*dy.shape), r(*x.shape)), {**attrs, "kernel_shape": [taps]}, "dw"
    )
    check(computed(call, dy, x), dw)


@pytest.mark.parametrize(
    ("shape", "weight", "attrs", "reason"),
    [
        ((2, 4, 9), (4, 2, 3), {"group": 2}, "a filter of each channel"),
        ((2, 4, 9), (8, 1, 3), {"group": 4}, "a filter of each channel"),
        ((2, 4, 9), (4, 1, 3), {"group": 4, "strides": [2]}, "in strides"),
        ((2, 4, 5, 5), (4, 1, 3, 3), {"group": 4}, "a filter of each channel"),
    ],
)
def test_other_convolutions_are_left_to_the_next_kernel(
    shape: tuple[int, ...], weight: tuple[int, ...], attrs: dict[str, Any], reason: str
) -> None:
    said = native("Conv").unsupported(spec_of(OpCase("Conv", (r(*shape), r(*weight)), attrs, "")))
    assert said is not None
    assert reason in said
