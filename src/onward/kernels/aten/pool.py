"""Max pooling and its gradient. PyTorch counts indices within one plane (the dims after the
second), ONNX through the whole tensor."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from onward.graph.ops.conv import ConvWindow
from onward.graph.types import DType, Type
from onward.kernels.aten.conv import unsupported
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch

aten = torch.ops.aten


def _planes(x: torch.Tensor) -> torch.Tensor:
    """x `[N,C,S]` as `[N,C,1,S]`, as the operators need; x of more dims unchanged."""
    return x.unsqueeze(2) if x.dim() == 3 else x


def _window(args: KernelArguments) -> tuple[list[int], ...]:
    """The window of a pooling: kernel, strides, pads and dilations."""
    window = ConvWindow(args.attrs, args.attrs["kernel_shape"])
    line = len(window.kernel) == 1
    found = (window.kernel, window.strides, window.before, window.dilations)
    return tuple([0 if i == 2 else 1, *n] if line else n for i, n in enumerate(found))


def _starts(x: torch.Tensor) -> torch.Tensor:
    """The flat index of each plane's first element, `i64[N,C,1,...]`."""
    n, c, *sizes = x.shape
    planes = torch.arange(n * c, dtype=torch.int64, device=x.device) * math.prod(sizes)
    return planes.view(n, c, *[1] * len(sizes))


def _bind_max_pool(args: KernelArguments) -> Launch:
    x, (y, index) = args.x(), args.outputs
    name = "max_pool3d_with_indices" if x.dim() == 5 else "max_pool2d_with_indices"
    pool: Any = partial(
        getattr(aten, name).out, _planes(x), *_window(args), False, out=_planes(y),
        indices=_planes(index),
    )  # fmt: skip
    starts = _starts(x)

    def launch() -> None:
        pool()
        index.add_(starts)

    return launch


def _bind_max_pool_grad(args: KernelArguments) -> Launch:
    dy, index, dx, (local,) = args.x(0), args.x(1), args.y, args.scratch
    name = (
        "max_pool3d_with_indices_backward" if dx.dim() == 5 else "max_pool2d_with_indices_backward"
    )
    # the operator reads only the sizes of x
    back: Any = partial(
        getattr(aten, name).grad_input, _planes(dy), _planes(dx), *_window(args), False,
        _planes(local), grad_input=_planes(dx),
    )  # fmt: skip
    starts = _starts(dx)

    def launch() -> None:
        torch.sub(index, starts, out=local)
        back()

    return launch


def _local(spec: KernelSpec) -> list[Type]:
    assert spec.inputs[1] is not None
    return [Type(DType.INT64, spec.inputs[1].shape)]


def _starts_bytes(spec: KernelSpec) -> int:
    """Bytes of the planes' first indices, made twice when a launch is bound."""
    return 2 * 8 * math.prod(spec.outputs[0].concrete.shape[:2]) + 4096  # type: ignore[arg-type]


KERNELS: dict[str, Kernel] = {
    "MaxPool": Kernel(
        "aten.max_pool_with_indices", _bind_max_pool, unsupported=unsupported, contiguous=None,
        workspace=_starts_bytes,
    ),
    "MaxPoolGrad": Kernel(
        "aten.max_pool_with_indices_backward", _bind_max_pool_grad, unsupported=unsupported,
        contiguous=None, scratch=_local, workspace=_starts_bytes,
    ),
}  # fmt: skip
