"""The product of gated linear units and its gradient, each in one pass over memory.

Operands may be strided: gate and up are views of one product's result. Bytes per element in f32:
12 forward and 20 backward, where the operators of silu's body, one after another, move 32 and 104.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.strided import more_dims, row_layout
from onward.kernels.triton.supported import other_types, where

_TILE = 1024  # elements that a program holds of each tensor


def _unsupported(spec: KernelSpec) -> str | None:
    return other_types((*spec.inputs, *spec.outputs)) or more_dims(spec)


def _bound(args: KernelArguments, tensors: Sequence[torch.Tensor], kernel: Any) -> Launch:
    layout = row_layout(tensors)
    # a single row may have any length: one width, so that none compiles a kernel of its own
    width = min(_TILE, 1 << (layout.features - 1).bit_length()) if layout.rows > 1 else _TILE
    height = _TILE // width
    grid = (math.ceil(layout.rows / height) * math.ceil(layout.features / width),)
    activation = str(args.attrs["activation"])

    def launch() -> None:
        kernel[grid](
            *tensors, *layout.numbers, ACTIVATION=activation, ROWS=height, WIDTH=width,
            num_warps=4, **layout.flags,
        )  # fmt: skip

    return launch if args.y.numel() else _nothing


def _nothing() -> None:
    pass


def _bind(args: KernelArguments) -> Launch:
    from onward.kernels.triton import gated_device as device

    return _bound(args, [args.x(0), args.x(1), args.y], device.gated)


def _bind_grad(args: KernelArguments) -> Launch:
    from onward.kernels.triton import gated_device as device

    return _bound(args, [*(args.x(i) for i in range(3)), *args.outputs], device.gated_gradient)


KERNELS: dict[str, Kernel] = {
    "GatedActivation": Kernel(
        "triton.gated_activation", _bind, unsupported=_unsupported, where=where,
        inplace=((0, 0), (0, 1)), strided=(0,),
    ),
    "GatedActivationGrad": Kernel(
        "triton.gated_activation_grad", _bind_grad, unsupported=_unsupported, where=where,
        inplace=((0, 1), (1, 2), (0, 0), (1, 0)), strided=(0, 1),
    ),
}  # fmt: skip
