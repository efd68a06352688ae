"""Convolutions of the ONNX standard, and the gradient of their weight.

Conv: https://onnx.ai/onnx/operators/onnx__Conv.html, ConvTranspose:
https://onnx.ai/onnx/operators/onnx__ConvTranspose.html. With x f[N,C,*S] and w f[M,C/g,*K], output
index `o` of a dim reads x at `s*o + d*k - p`: s strides, d dilations, p pads, g groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, Types, standard
from onward.graph.types import Shape, Size, Type, floor_divide, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


class ConvWindow:
    """How a window of `kernel` elements moves over dims: a convolution's attributes, defaults
    filled in."""

    def __init__(self, attrs: Mapping[str, Any], kernel: Sequence[int]) -> None:
        rank = len(kernel)
        self.kernel = [int(k) for k in kernel]
        self.strides = _numbers(attrs, "strides", [1] * rank)
        self.dilations = _numbers(attrs, "dilations", [1] * rank)
        pads = _numbers(attrs, "pads", [0] * 2 * rank)
        self.before, self.after = pads[:rank], pads[rank:]

    def reach(self, i: int) -> int:
        """The extent of the window in dim `i`: elements from the first to the last that it
        reads."""
        return self.dilations[i] * (self.kernel[i] - 1) + 1

    def places(self, size: Size, i: int) -> Size:
        """The number of positions of the window in a dim of this size. Raises ValueError where
        there is none, and where the number is no polynomial of symbolic sizes."""
        room = size + (self.before[i] + self.after[i] - self.reach(i))
        steps = floor_divide(room, self.strides[i])
        if steps is None:
            raise ValueError(
                f"a window of {self.kernel[i]} in steps of {self.strides[i]} over {size}: how "
                "often it fits is no polynomial of the batch's sizes"
            )
        if isinstance(steps, int) and steps < 0:
            raise ValueError(
                f"a window of {self.reach(i)} is larger than the padded size "
                f"{size + (self.before[i] + self.after[i])}"
            )
        return steps + 1

    def covered(self, places: Size, i: int) -> Size:
        """The smallest size of a dim with this many positions."""
        return (places - 1) * self.strides[i] + (self.reach(i) - self.before[i] - self.after[i])


def _numbers(attrs: Mapping[str, Any], name: str, default: list[int]) -> list[int]:
    """An attribute with one number for each of `default`. Raises ValueError for another length, and
    for numbers below the smallest default."""
    given, least = [int(n) for n in attrs.get(name) or default], min(default, default=0)
    if len(given) != len(default) or any(n < least for n in given):
        raise ValueError(f"{name} {given} for {len(default)} numbers, none below {least}")
    return given


def plain_window(call: Call) -> None:
    """Raises ValueError where the op is asked to compute the pads itself."""
    if call.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", b"NOTSET"):
        raise ValueError(f"{call.op_type}: auto_pad is not supported; fix: write the pads")


def spatial(call: Call, i: int) -> list[int]:
    """The kernel sizes of the weight, input `i`: its dims after the first two."""
    sizes = call.shape(i)[2:]
    given = call.attrs.get("kernel_shape")
    if given is not None and tuple(given) != sizes:
        raise ValueError(f"{call.op_type}: kernel_shape {given} for the weight {call.type(i)}")
    # a weight that another call computes may have open sizes; records get numbers only
    return list(sizes)  # type: ignore[arg-type]


def _operands(call: Call) -> tuple[Shape, Shape, int]:
    """The shapes of x and w, and the number of groups. Raises ValueError where ranks or types
    differ."""
    plain_window(call)
    x, w, group = call.type(0), call.type(1), int(call.attrs.get("group", 1))
    if x.rank < 3 or x.rank != w.rank:
        raise ValueError(f"{call.op_type}({x}, {w}): x and w have a batch, channels and 1+ more")
    if x.dtype != w.dtype:
        raise ValueError(f"{call.op_type}({x}, {w}): element types differ")
    return x.shape, w.shape, group


def _check_bias(call: Call, channels: Size) -> None:
    if call.present(2) and call.shape(2) != (channels,):
        raise ValueError(f"{call.op_type}: the bias {call.type(2)} for {channels} channels")


def _conv(call: Call) -> Type:
    x, w, group = _operands(call)
    if x[1] != w[1] * group or (isinstance(w[0], int) and w[0] % group):
        raise ValueError(f"Conv({call.type(0)}, {call.type(1)}) in {group} groups: channels differ")
    _check_bias(call, w[0])
    return call.type().with_shape((x[0], w[0], *_conv_sizes(call, x[2:], spatial(call, 1))))


def _conv_sizes(call: Call, sizes: Shape, kernel: Sequence[Any]) -> list[Size]:
    """The sizes of a Conv's result. The kernel's sizes may be polynomials, as when a gradient is
    written as a Conv."""
    plain = [k if isinstance(k, int) else 1 for k in kernel]
    window = ConvWindow(call.attrs, plain)
    out: list[Size] = []
    for i, size in enumerate(sizes):
        hidden = (kernel[i] - plain[i]) * window.dilations[i]
        out.append(window.places(size - hidden, i))
    return out


def _conv_transpose(call: Call) -> Type:
    x, w, group = _operands(call)
    if call.attrs.get("output_shape") is not None:
        raise ValueError("ConvTranspose: output_shape is not supported; fix: write the pads")
    if x[1] != w[0] or (isinstance(w[0], int) and w[0] % group):
        raise ValueError(
            f"ConvTranspose({call.type(0)}, {call.type(1)}) in {group} groups: channels differ"
        )
    _check_bias(call, w[1] * group)
    window = ConvWindow(call.attrs, spatial(call, 1))
    more = _numbers(call.attrs, "output_padding", [0] * len(window.kernel))
    sizes = [window.covered(size, i) + more[i] for i, size in enumerate(x[2:])]
    if any(isinstance(size, int) and size < 1 for size in sizes):
        raise ValueError(f"ConvTranspose({call.type(0)}, {call.type(1)}): the pads leave nothing")
    return call.type().with_shape((x[0], w[1] * group, *sizes))


def _weight_grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The gradient of a Conv's weight: a Conv of x by dy with batch and channels exchanged. dw
    f[M,C/g,*K] sums x at `s*o + d*k - p` over n and o, so that strides and dilations are exchanged
    too."""
    dy, x = inputs
    assert dy is not None and x is not None
    n, c, *sizes = type_of(x).shape
    group, rank = int(attrs.get("group", 1)), len(sizes)
    window = ConvWindow(attrs, attrs["kernel_shape"])
    assert isinstance(c, int)
    after = list(window.after)
    for i, size in enumerate(sizes):  # crop what no position reads
        rest = size - window.covered(type_of(dy).shape[2 + i], i)
        assert isinstance(rest, int)
        if rest > after[i]:
            sizes[i] = size - (rest - after[i])
            x = b.slice(x, 2 + i, 0, sizes[i])
        after[i] = max(0, after[i] - rest)
    # f[N,g,C/g,*S] -> f[C/g,g,N,*S]
    apart = b.transpose(b.reshape(x, (n, group, c // group, *sizes)), _swapped(rank + 3, 0, 2))
    dw = b.Conv(
        b.reshape(apart, (c // group, n * group, *sizes)),
        b.transpose(dy, _swapped(rank + 2, 0, 1)),
        strides=window.dilations,
        dilations=window.strides,
        pads=[*window.before, *after],
        group=group,
    )
    return [b.transpose(dw, _swapped(rank + 2, 0, 1))]


def _swapped(rank: int, i: int, j: int) -> list[int]:
    order = list(range(rank))
    order[i], order[j] = j, i
    return order


def _infer_weight_grad(call: Call) -> Type:
    dy, x, group = call.shape(0), call.shape(1), int(call.attrs.get("group", 1))
    channels, kernel = x[1], call.attrs["kernel_shape"]
    if dy[0] != x[0] or not isinstance(channels, int) or channels % group:
        raise ValueError(f"ConvWeightGrad({call.type(0)}, {call.type(1)}) in {group} groups")
    window = ConvWindow(call.attrs, kernel)
    for i, size in enumerate(x[2:]):
        rest = size - window.covered(dy[2 + i], i)
        if not isinstance(rest, int) or not 0 <= rest < window.strides[i]:
            raise ValueError(f"ConvWeightGrad({call.type(0)}, {call.type(1)}): sizes differ")
    return call.type(1).with_shape((dy[1], channels // group, *kernel))


def _flops(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """FLOPs of a Conv: each element of y reads a whole kernel."""
    w, y = inputs[1], outputs[0]
    assert w is not None and y is not None
    return product(y.shape) * product(w.shape[1:]) * 2


def _transpose_flops(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """FLOPs of a ConvTranspose: each element of x is multiplied by a whole kernel."""
    x, w = inputs[0], inputs[1]
    assert x is not None and w is not None
    return product(x.shape) * product(w.shape[1:]) * 2


def _weight_grad_flops(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    dy, dw = inputs[0], outputs[0]
    assert dy is not None and dw is not None
    return product(dy.shape) * product(dw.shape[1:]) * 2


OPS = (
    *standard(_conv, "Conv", flops=_flops),
    *standard(_conv_transpose, "ConvTranspose", flops=_transpose_flops),
    Op(
        name="ConvWeightGrad",
        infer=_infer_weight_grad,
        body=_weight_grad,
        flops=_weight_grad_flops,
        doc="dw f[M,C/g,*K] of Conv from dy f[N,M,*O] and x f[N,C,*S], K being `kernel_shape`; of "
        "ConvTranspose from its x in place of dy and its dy in place of x.",
        cases=(
            ({"kernel_shape": [3]}, ("f32[2,4,5]", "f32[2,3,7]")),
            (
                {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0]},
                ("f32[2,4,4,3]", "f32[2,3,8,4]"),
            ),
            (
                {"kernel_shape": [2, 3], "dilations": [2, 1], "strides": [3, 2], "group": 2},
                ("f32[3,4,2,2]", "f32[3,2,7,6]"),
            ),
            ({"kernel_shape": [3, 3], "group": 4, "pads": [1] * 4}, ("f32[1,4,5,5]",) * 2),
            ({"kernel_shape": [4], "group": 3, "pads": [3, 3]}, ("f32[2,3,23]", "f32[2,3,20]")),
            ({"kernel_shape": [2, 1, 2]}, ("f32[1,2,2,3,1]", "f32[1,3,3,3,2]")),
            ({"kernel_shape": [4, 4], "strides": [4, 4]}, ("f32[2,5,2,1]", "f32[2,3,8,4]")),
        ),
    ),
)
