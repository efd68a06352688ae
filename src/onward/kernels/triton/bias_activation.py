"""An activation with the bias before it in one pass over memory, and its gradient with the bias's
in one pass, whose sums over rows are added in a fixed order.

Bytes per element of bf16: 4 forward and 6 backward. Separate operators move 8 and 8, or 4 forward
where the product adds the bias. Gelu, GeluGrad and Relu without a bias stay torch's operators,
which are one pass already.
"""

from __future__ import annotations

import math
from typing import Any

from onward.graph.types import DType, Type, product
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.supported import other_types, where

_TILE = 2048  # elements that a program holds
_WIDEST = 1024  # features of a block
_WIDEST_GRAD = 256  # fewer, so that enough programs share the rows
_PROGRAMS = 1024  # of a gradient, about: enough to fill a device once
_PARTS = 32  # partial sums that a program holds at once
_JOINED = 64  # features of a program that joins them


def _unsupported(spec: KernelSpec) -> str | None:
    return other_types((*spec.inputs, *spec.outputs))


def _tile(features: int, widest: int) -> tuple[int, int]:
    """The rows and features of a block."""
    width = min(1 << max(0, features - 1).bit_length(), widest)
    return _TILE // width, width


def _most_programs(rows: int, features: int) -> int:
    """The programs that share the rows, at most."""
    height, width = _tile(features, _WIDEST_GRAD)
    beside = max(1, math.ceil(features / width))
    return max(1, min(math.ceil(rows / height), _PROGRAMS // beside))


def _scratch(spec: KernelSpec) -> list[Type]:
    """Each program's sums for dbias, f32[programs, D]."""
    *outer, features = spec.outputs[0].shape
    rows = product(outer)
    assert isinstance(rows, int) and isinstance(features, int)
    return [Type(DType.FLOAT, (_most_programs(rows, features), features))]


def _bind(args: KernelArguments) -> Launch:
    from onward.kernels.triton import bias_activation_device as device

    x, bias, y = args.x(0), args.x(1), args.y
    rows, features = math.prod(x.shape[:-1]), x.shape[-1]
    height, width = _tile(features, _WIDEST)
    grid = (math.ceil(rows / height) * math.ceil(features / width),)
    kind = args.attrs["activation"]
    kernel: Any = device.bias_activation

    def launch() -> None:
        if y.numel():
            kernel[grid](x, bias, y, rows, features, KIND=kind, ROWS=height, WIDTH=width)

    return launch


def _bind_grad(args: KernelArguments) -> Launch:
    from onward.kernels.triton import bias_activation_device as device

    dy, x, bias = [*args.inputs, None][:3]
    assert dy is not None and x is not None
    dx, dbias = args.outputs
    rows, features = math.prod(x.shape[:-1]), x.shape[-1]
    height, width = _tile(features, _WIDEST_GRAD)
    blocks = math.ceil(math.ceil(rows / height) / _most_programs(rows, features))
    programs = max(1, math.ceil(rows / (height * max(1, blocks))))
    partial = args.scratch[0][:programs]  # f32[programs,D]
    grid = (programs * math.ceil(features / width),)
    kind = args.attrs["activation"]
    gradient: Any = device.bias_activation_gradient
    join: Any = device.joined_sums

    def launch() -> None:
        if not features:
            return
        gradient[grid](
            dy, x, x if bias is None else bias, dx, partial, rows, blocks, features, KIND=kind,
            ROWS=height, WIDTH=width, HAS_BIAS=bias is not None,
        )  # fmt: skip
        join[(math.ceil(features / _JOINED),)](
            partial, dbias, programs, features, PARTS=_PARTS, WIDTH=_JOINED
        )

    return launch


KERNELS: dict[str, Kernel] = {
    "BiasActivation": Kernel(
        "triton.bias_activation", _bind, unsupported=_unsupported, where=where, inplace=((0, 0),),
        contiguous=None,
    ),
    "BiasActivationGrad": Kernel(
        "triton.bias_activation_grad", _bind_grad, unsupported=_unsupported, where=where,
        inplace=((0, 0), (0, 1)), contiguous=None, scratch=_scratch,
    ),
}  # fmt: skip
