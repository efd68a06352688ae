"""Convolutions over one dim with a filter for each channel, as in Mamba and Conformer, and their
gradients, each in one launch.

Pads may be uneven, as in causal convolutions, for which PyTorch pads a copy. Bytes per element of
bf16: 4 forward, 4 for the gradient of x and 4 for that of the filter, whose sums have one order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from onward.kernels.aten.conv import not_depthwise
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.supported import other_types, where

_MOST_TAPS = 64
_WIDTH = 1024  # places of a program
_HELD = 4096  # products that a program sums side by side


def _unsupported(spec: KernelSpec) -> str | None:
    if (why := other_types((*spec.inputs, *spec.outputs))) is not None:
        return why
    if (why := not_depthwise(spec)) is not None:
        return why
    weight = spec.outputs[0] if spec.op == "ConvWeightGrad" else spec.inputs[1]
    assert weight is not None
    taps = weight.shape[2]
    if not isinstance(taps, int):
        return "an open number of taps"
    return None if taps <= _MOST_TAPS else f"filters of {taps} taps"


def _nothing() -> None:
    pass


def _step_and_shift(args: KernelArguments) -> tuple[int, int]:
    """How far taps lie apart, and where the first tap of the first place lies."""
    return int(args.attrs.get("dilations", [1])[0]), -int(args.attrs.get("pads", [0])[0])


def _bind(args: KernelArguments, turn: int) -> Launch:
    """Binds a convolution. turn: -1 for a transposed one, which reads backwards."""
    from onward.kernels.triton import depthwise_conv_device as device

    x, w, bias = [*args.inputs, None][:3]
    assert x is not None and w is not None
    y, (step, shift) = args.y, _step_and_shift(args)
    if not y.numel():
        return _nothing
    samples, channels, places = y.shape
    width = min(_WIDTH, max(16, 1 << (places - 1).bit_length()))
    kernel: Any = device.depthwise_conv
    return partial(
        kernel[(samples * channels * -(-places // width),)], x, w, w if bias is None else bias, y,
        channels, x.shape[2], places, turn * shift, STEP=turn * step, TAPS=w.shape[2],
        HAS_BIAS=bias is not None, WIDTH=width, num_warps=4,
    )  # fmt: skip


def _bind_weight_grad(args: KernelArguments) -> Launch:
    from onward.kernels.triton import depthwise_conv_device as device

    dy, x, dw = args.x(0), args.x(1), args.y
    step, shift = _step_and_shift(args)
    if not dw.numel():
        return _nothing
    if not dy.numel():
        return dw.zero_
    samples, channels, places = dy.shape
    taps = dw.shape[2]
    held = 1 << (taps - 1).bit_length()
    width = min(_HELD // held, max(16, 1 << (places - 1).bit_length()))
    kernel: Any = device.depthwise_conv_weight_gradient
    return partial(
        kernel[(channels,)], dy, x, dw, samples, channels, x.shape[2], places, shift, STEP=step,
        TAPS=taps, TAPS_HELD=held, WIDTH=width, num_warps=8,
    )  # fmt: skip


def _kernel(name: str, bind: Any) -> Kernel:
    return Kernel(f"triton.{name}", bind, unsupported=_unsupported, where=where, contiguous=None)


KERNELS: dict[str, Kernel] = {
    "Conv": _kernel("depthwise_conv", partial(_bind, turn=1)),
    "ConvTranspose": _kernel("depthwise_conv_transpose", partial(_bind, turn=-1)),
    "ConvWeightGrad": _kernel("depthwise_conv_weight_grad", _bind_weight_grad),
}
