"""Complex tensors as pairs of real ones: for rotary embeddings (`polar`, `view_as_complex`), `fft`.

Operators of ONNX take only real tensors. So a complex value exists only during capture, as a pair,
until `view_as_real`, `.real`, `.imag` or `abs` makes real tensors of it. Its gradient is the pair
of the parts' gradients, which is PyTorch's convention for a real loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onward.capture.aten.call import AtenCall, Translation, table
from onward.errors import CaptureError
from onward.graph.einsum import einsum
from onward.graph.graph import Graph, Value, type_of
from onward.graph.types import DType, Type


@dataclass(frozen=True)
class Complex:
    """A complex value `re + i im`, both of the same shape."""

    re: Value
    im: Value


def constant(graph: Graph, tensor: torch.Tensor) -> Value | Complex:
    """Returns a constant with the tensor's numbers, in f32 for a 16-bit float."""
    x = tensor.detach().cpu()
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    if not x.is_complex():
        return graph.constant(x.numpy().copy())
    return Complex(*(graph.constant(part.numpy().copy()) for part in (x.real, x.imag)))


class PartCall(AtenCall):
    """A call with complex arguments or a complex result. `type` is that of one part."""

    @property
    def type(self) -> Type:
        made = self.node.meta["val"]
        if not made.is_complex():
            return super().type
        dtype = DType.DOUBLE if made.dtype == torch.complex128 else DType.FLOAT
        return Type(dtype, tuple(self.t.size_of(s) for s in made.shape))


def is_complex(node: Any) -> bool:
    """Returns whether an op has a complex argument or result."""
    made = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    tensors = [t for m in made for t in (m if isinstance(m, (list, tuple)) else [m])]
    return any(isinstance(t, torch.Tensor) and t.is_complex() for t in tensors)


def translated(name: str, plain: Translation | None, c: AtenCall, args: Any, kwargs: Any) -> Any:
    """Translates an op over pairs. plain: its translation for real tensors, or None.

    Raises CaptureError for an op that has no translation for pairs.
    """
    call = PartCall(c.t, c.node, c.b)
    if name in COMPLEX:
        return COMPLEX[name](call, *args, **kwargs)
    if name in _EACH and plain is not None:
        parts = [plain(call, *[_part(a, which) for a in args], **kwargs) for which in ("re", "im")]
        if isinstance(parts[0], list):
            return [Complex(re, im) for re, im in zip(*parts, strict=True)]
        return Complex(*parts)
    raise CaptureError(
        f"{name} has no translation for complex tensors; fix: compute with x.real and x.imag "
        "(torch.view_as_real)"
    )


def _part(argument: Any, which: str) -> Any:
    if isinstance(argument, list):
        return [_part(a, which) for a in argument]
    return getattr(argument, which) if isinstance(argument, Complex) else argument


def _pair(c: AtenCall, x: Any, dtype: DType = DType.FLOAT) -> Complex:
    if isinstance(x, Complex):
        return x
    if isinstance(x, complex):
        return Complex(c.b.scalar(x.real, dtype), c.b.scalar(x.imag, dtype))
    re = c.value(x, dtype)
    return Complex(re, c.b.full(0.0, type_of(re)))


def _view_as_complex(c: AtenCall, x: Value) -> Complex:
    last = type_of(x).rank - 1
    re, im = (c.b.squeeze(c.b.slice(x, last, i, i + 1), [last]) for i in (0, 1))
    return Complex(re, im)


def _view_as_real(c: AtenCall, x: Complex) -> Value:
    last = type_of(x.re).rank
    return c.b.Concat(c.b.unsqueeze(x.re, [last]), c.b.unsqueeze(x.im, [last]), axis=last)


def _polar(c: AtenCall, size: Value, angle: Value) -> Complex:
    return Complex(c.b.Mul(size, c.b.Cos(angle)), c.b.Mul(size, c.b.Sin(angle)))


def _mul(c: AtenCall, a: Any, b: Any) -> Complex:
    if not isinstance(b, (Complex, complex)):
        a, b = b, a
    if not isinstance(a, (Complex, complex)):
        a, b = c.value(a, c.type.dtype), _pair(c, b, c.type.dtype)
        return Complex(c.b.Mul(a, b.re), c.b.Mul(a, b.im))
    a, b = _pair(c, a, c.type.dtype), _pair(c, b, c.type.dtype)
    re = c.b.Sub(c.b.Mul(a.re, b.re), c.b.Mul(a.im, b.im))
    return Complex(re, c.b.Add(c.b.Mul(a.re, b.im), c.b.Mul(a.im, b.re)))


def _div(c: AtenCall, a: Any, b: Any) -> Complex:
    if isinstance(b, (Complex, complex)):
        raise CaptureError(
            "division by a complex tensor has no translation; fix: a * b.conj() / b.abs()**2"
        )
    a, b = _pair(c, a, c.type.dtype), c.value(b, c.type.dtype)
    return Complex(c.b.Div(a.re, b), c.b.Div(a.im, b))


def _add(c: AtenCall, a: Any, b: Any, *, alpha: float = 1) -> Complex:
    a, b = _pair(c, a, c.type.dtype), _pair(c, b, c.type.dtype)
    if alpha != 1:
        b = _mul(c, alpha, b)
    shape = c.type.shape
    return Complex(*(c.b.expand(c.b.Add(x, y), shape) for x, y in ((a.re, b.re), (a.im, b.im))))


def _sub(c: AtenCall, a: Any, b: Any, *, alpha: float = 1) -> Complex:
    return _add(c, a, b, alpha=-alpha)


def _product(c: AtenCall, a: Any, b: Any) -> Complex:
    a, b = _pair(c, a, c.type.dtype), _pair(c, b, c.type.dtype)
    re = c.b.Sub(c.b.MatMul(a.re, b.re), c.b.MatMul(a.im, b.im))
    return Complex(re, c.b.Add(c.b.MatMul(a.re, b.im), c.b.MatMul(a.im, b.re)))


def _to(c: AtenCall, x: Any, *_: Any, **__: Any) -> Any:
    if c.node.meta["val"].is_complex():
        return _pair(c, x, c.type.dtype)
    return c.b.cast(x.re, c.type.dtype)


def _fourier(
    c: AtenCall, x: Any, size: Any = None, dim: Any = None, norm: str | None = None
) -> Complex:
    """The discrete Fourier transform as products with its matrix, one dim after another."""
    name = c.node.target._schema.name.split("::")[1]
    if size is not None:
        raise CaptureError(
            "a Fourier transform with n= or s= has no translation; fix: pad "
            "or slice the input to that size first"
        )
    found = _pair(c, x, c.type.dtype)
    rank = type_of(found.re).rank
    if name.endswith("fft"):
        dims = [-1 if dim is None else dim]
    else:
        dims = dim or ([-2, -1] if name.endswith("2") else range(rank))
    inverse = name.removeprefix("fft_").startswith("i")
    for d in dims:
        found = _transform(c, found, d % rank, inverse, norm)
    return found


def _transform(c: AtenCall, x: Complex, dim: int, inverse: bool, norm: str | None) -> Complex:
    size = type_of(x.re).shape[dim]
    dtype = type_of(x.re).dtype
    count = c.value(size, DType.DOUBLE)
    places = c.b.arange(size)
    turns = c.b.Mod(c.b.Mul(c.b.unsqueeze(places, [1]), places), c.b.size(size))  # i64[N,N]
    full = c.b.scalar(2 * math.pi * (1 if inverse else -1), DType.DOUBLE)
    angle = c.b.Mul(c.b.Div(c.b.cast(turns, DType.DOUBLE), count), full)
    matrix = Complex(*(c.b.cast(f(angle), dtype) for f in (c.b.Cos, c.b.Sin)))
    order = [*(d for d in range(type_of(x.re).rank) if d != dim), dim]
    back = [int(i) for i in np.argsort(order)]
    moved = Complex(c.b.transpose(x.re, order), c.b.transpose(x.im, order))
    y = _product(c, moved, matrix)
    if norm == "ortho" or (norm or "backward") == ("backward" if inverse else "forward"):
        whole = c.value(size, dtype)
        whole = c.b.Sqrt(whole) if norm == "ortho" else whole
        y = Complex(c.b.Div(y.re, whole), c.b.Div(y.im, whole))
    return Complex(c.b.transpose(y.re, back), c.b.transpose(y.im, back))


def _abs(c: AtenCall, x: Complex) -> Value:
    """The absolute value, with gradient 0 at 0, as in PyTorch."""
    square = c.b.Add(c.b.Mul(x.re, x.re), c.b.Mul(x.im, x.im))
    zero, one = (c.b.scalar(n, type_of(square).dtype) for n in (0.0, 1.0))
    nothing = c.b.Equal(square, zero)
    return c.b.Where(nothing, zero, c.b.Sqrt(c.b.Where(nothing, one, square)))


def _einsum(c: AtenCall, equation: str, tensors: list[Any], **_: Any) -> Complex:
    xs = [_pair(c, x) for x in tensors]
    if len(xs) == 1:
        return Complex(einsum(c.b, equation, [xs[0].re]), einsum(c.b, equation, [xs[0].im]))
    if len(xs) > 2:
        raise CaptureError(
            "einsum of more than two complex tensors has no translation; fix: "
            "multiply two at a time"
        )
    ac, bd, ad, bc = (
        einsum(c.b, equation, pair)
        for pair in ((xs[0].re, xs[1].re), (xs[0].im, xs[1].im), (xs[0].re, xs[1].im),
                     (xs[0].im, xs[1].re))
    )  # fmt: skip
    return Complex(c.b.Sub(ac, bd), c.b.Add(ad, bc))


Over = Callable[..., Any]
COMPLEX: dict[str, Over] = table(
    {
        _view_as_complex: "view_as_complex.default",
        _view_as_real: "view_as_real.default",
        _polar: "polar.default",
        lambda c, re, im: Complex(re, im): "complex.default",
        lambda c, x: _pair(c, x).re: "real.default",
        lambda c, x: _pair(c, x).im: "imag.default",
        lambda c, x: Complex(x.re, c.b.Neg(x.im)): "conj.default _conj.default "
        "conj_physical.default",
        lambda c, x: Complex(c.b.Neg(x.re), c.b.Neg(x.im)): "neg.default",
        _mul: "mul.Tensor mul.Scalar",
        _div: "div.Tensor div.Scalar",
        _add: "add.Tensor",
        _sub: "sub.Tensor",
        _abs: "abs.default",
        _einsum: "einsum.default",
        _product: "matmul.default mm.default bmm.default",
        _to: "to.dtype to.device to.dtype_layout _to_copy.default",
        _fourier: "fft_fft.default fft_ifft.default fft_fftn.default fft_ifftn.default "
        "fft_fft2.default fft_ifft2.default",
    }
)
# ops that only move elements: translated for each part by itself
_EACH = (
    "view.default", "reshape.default", "unsqueeze.default", "squeeze.default", "squeeze.dim",
    "squeeze.dims", "expand.default", "expand_as.default", "permute.default", "transpose.int",
    "t.default", "slice.Tensor", "select.int", "index_select.default", "index.Tensor",
    "clone.default", "contiguous.default", "alias.default", "detach.default", "cat.default",
    "stack.default", "flatten.using_ints", "unflatten.int", "split.Tensor", "chunk.default",
    "unbind.int", "resolve_conj.default", "resolve_neg.default", "lift_fresh_copy.default",
)  # fmt: skip
