"""Convolutions and the gradient of their weight. PyTorch's operators return new tensors, which are
copied; its `out=` forms would do the same."""

from __future__ import annotations

from typing import Any

import torch

from onward.graph.ops.conv import ConvWindow
from onward.graph.types import DType, Type, product, value
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch

aten = torch.ops.aten


def _window(spec: KernelSpec) -> ConvWindow:
    """The window of a convolution, from its weight's sizes or the attribute `kernel_shape`."""
    given = spec.attrs.get("kernel_shape")
    if given is None:
        w = spec.inputs[1]
        assert w is not None
        given = [int(n) for n in w.concrete.shape[2:]]  # type: ignore[arg-type]
    return ConvWindow(spec.attrs, given)


def unsupported(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: the forms that PyTorch's operators lack."""
    if len(spec.outputs[0].shape) > 5:
        return f"{spec.op} over more than three dims"
    pads = spec.attrs.get("pads", [])
    half = len(pads) // 2
    return None if list(pads[:half]) == list(pads[half:]) else f"{spec.op} with uneven pads"


def not_depthwise(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: anything but a convolution over one dim with one filter per channel and
    stride 1, or a gradient of one."""
    inputs, attrs = spec.inputs, spec.attrs
    image, weight = inputs[0], spec.outputs[0] if spec.op == "ConvWeightGrad" else inputs[1]
    assert image is not None and weight is not None
    # exactly one result per channel: sizes may be symbolic, groups are not
    other = inputs[1] if spec.op == "ConvWeightGrad" else spec.outputs[0]
    assert other is not None
    alone = image.shape[1:2] == other.shape[1:2] and weight.shape[1:2] == (1,)
    if image.rank != 3 or not alone:
        return f"{spec.op} other than over one dim, by a filter of each channel"
    return None if attrs.get("strides", [1]) == [1] else f"{spec.op} in strides"


def _call(args: KernelArguments, rank: int, transposed: bool) -> tuple[Any, ...]:
    """Arguments for PyTorch's `convolution`: strides, pads, dilations, transposed, output padding,
    groups."""
    attrs, ones, zeros = args.attrs, [1] * rank, [0] * rank
    return (
        attrs.get("strides", ones), attrs.get("pads", zeros)[:rank], attrs.get("dilations", ones),
        transposed, attrs.get("output_padding", zeros), attrs.get("group", 1),
    )  # fmt: skip


def _bind(args: KernelArguments, transposed: bool) -> Launch:
    x, w, y = args.x(0), args.x(1), args.y
    bias = args.inputs[2] if len(args.inputs) > 2 else None
    call = (x, w, bias, *_call(args, x.dim() - 2, transposed))
    return lambda: y.copy_(aten.convolution(*call))


def _bind_conv(args: KernelArguments) -> Launch:
    return _bind(args, transposed=False)


def _bind_transpose(args: KernelArguments) -> Launch:
    return _bind(args, transposed=True)


def _bind_weight_grad(args: KernelArguments) -> Launch:
    """Binds the gradient of a weight. PyTorch's operator reads only the sizes of the weight, so
    that the result can stand in for it."""
    dy, x, dw = args.x(0), args.x(1), args.y
    call = (dy, x, dw, None, *_call(args, x.dim() - 2, False), [False, True, False])
    return lambda: dw.copy_(aten.convolution_backward(*call)[1])


def workspace(spec: KernelSpec) -> int:
    """Bytes of workspace: the result before it is copied, and oneDNN's reordered operands, for
    gradients the result twice. For other dtypes, a matrix of the elements that every position
    reads."""
    operands = [t.concrete for t in (*spec.inputs, *spec.outputs) if t is not None]
    result = operands[-1]
    if result.dtype == DType.FLOAT:
        weight = 2 if spec.op == "ConvWeightGrad" else 1
        sizes = [_blocked(t, both=i == weight) for i, t in enumerate(operands)]
        again = 0 if spec.op == "Conv" else sizes[-1]
        return sum(sizes) + again + result.nbytes + 2**14
    image, places = (0, -1) if spec.op == "Conv" else (-1, 0) if "Trans" in spec.op else (1, 0)
    (n, channels, *_), out = operands[image].shape, operands[places].shape[2:]
    columns = product((n, channels, *_window(spec).kernel, *out))
    read = result.with_shape((columns,)).nbytes
    return sum(t.nbytes for t in operands) + read + 2**14


def _blocked(t: Type, both: bool) -> int:
    """Bytes of `t` with its channels in blocks of 16; for a weight, those of both of its channel
    dims."""
    if t.rank < 2:
        return t.nbytes
    n, channels, *sizes = t.shape
    whole = [-(-value(size) // 16) * 16 for size in (n, channels)]
    return t.with_shape((whole[0] if both else n, whole[1], *sizes)).nbytes


def _kernel(name: str, bind: Any) -> Kernel:
    return Kernel(name, bind, unsupported=unsupported, contiguous=None, workspace=workspace)


KERNELS: dict[str, Kernel] = {
    "Conv": _kernel("aten.convolution", _bind_conv),
    "ConvTranspose": _kernel("aten.convolution_transpose", _bind_transpose),
    "ConvWeightGrad": _kernel("aten.convolution_backward", _bind_weight_grad),
}
