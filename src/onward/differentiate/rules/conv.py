"""Gradients of convolutions."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder
from onward.graph.graph import Value, type_of
from onward.graph.ops.conv import ConvWindow

_WINDOW = ("strides", "dilations", "pads", "group")


def _shared(attrs: dict[str, Any]) -> dict[str, Any]:
    """The attributes that a convolution and its gradients share."""
    return {k: attrs[k] for k in _WINDOW if k in attrs}


def _bias(b: Builder, dy: Value) -> Value:
    """The gradient of a bias: dy f[N,M,*O] summed to f[M]."""
    return b.reduce_sum(dy, [0, *range(2, type_of(dy).rank)], keepdims=False)


def _kernel(w: Value) -> list[int]:
    return [int(n) for n in type_of(w).shape[2:]]  # type: ignore[arg-type]


@rule("Conv")
def _conv(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of Conv. dx is a transposed convolution of dy, padded for elements of x that
    the last step did not reach."""
    dy, (x, w) = only(dys), xs[:2]
    window = ConvWindow(attrs, _kernel(w))
    sizes, places = type_of(x).shape[2:], type_of(dy).shape[2:]
    rest = [
        size - window.covered(n, i) for i, (size, n) in enumerate(zip(sizes, places, strict=True))
    ]
    more = {"output_padding": rest} if any(rest) else {}
    dx = b.ConvTranspose(dy, w, **_shared(attrs), **more)
    dw = b.ConvWeightGrad(dy, x, kernel_shape=_kernel(w), **_shared(attrs))
    return [dx, dw, _bias(b, dy)][: len(xs)]


@rule("ConvTranspose")
def _conv_transpose(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of ConvTranspose. dx is a convolution of dy over as many places as x has. An
    output padding of a stride or more counts against the cropping of the result; what exceeds that
    is ignored."""
    dy, (x, w) = only(dys), xs[:2]
    window, read, shared = ConvWindow(attrs, _kernel(w)), dy, _shared(attrs)
    rank = len(window.kernel)
    padding = attrs.get("output_padding") or [0] * rank
    pads = list(attrs.get("pads") or [0] * 2 * rank)
    for i, size in enumerate(type_of(dy).shape[2:]):
        if padding[i] >= window.strides[i]:
            beyond = padding[i] - pads[rank + i]
            pads[rank + i] = max(0, -beyond)
            if beyond > 0:
                read = b.slice(read, 2 + i, 0, size - beyond)
    if pads[:rank] != pads[rank:]:  # kernels need symmetric padding
        none = [0, 0]
        read = b.Pad(read, b.ints([*none, *pads[:rank], *none, *pads[rank:]]))
        shared["pads"] = [0] * 2 * rank
    elif any(pads):
        shared["pads"] = pads
    dx = b.Conv(read, w, **shared)
    dw = b.ConvWeightGrad(x, read, kernel_shape=_kernel(w), **shared)
    return [dx, dw, _bias(b, dy)][: len(xs)]
