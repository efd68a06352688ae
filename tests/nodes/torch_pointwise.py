"""Pointwise ops, activations, reductions and products in torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from nodes.torch_table import NoForm, T, ints, row

EVEN = "ties share evenly"


def _same(name: str, function: Any, kinks: str = "") -> None:
    row(name, kinks=kinks)(lambda a, *xs: function(*xs))


for _name, _function in {
    "Acos": torch.acos, "Acosh": torch.acosh, "Add": torch.add, "Asin": torch.asin,
    "Asinh": torch.asinh, "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil,
    "Cos": torch.cos, "Cosh": torch.cosh, "Div": torch.div, "Erf": torch.erf, "Exp": torch.exp,
    "Floor": torch.floor, "Identity": torch.clone, "Log": torch.log, "MatMul": torch.matmul,
    "Mish": F.mish, "Mul": torch.mul, "Neg": torch.neg, "Pow": torch.pow,
    "Reciprocal": torch.reciprocal, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sin": torch.sin, "Sinh": torch.sinh, "Softplus": F.softplus, "Softsign": F.softsign,
    "Sqrt": torch.sqrt, "Sub": torch.sub, "Tan": torch.tan, "Tanh": torch.tanh,
    "Where": torch.where,
}.items():  # fmt: skip
    _same(_name, _function)
_same("Abs", torch.abs, "0 at 0")
_same("Sign", torch.sign, "0 at 0")
_same("Relu", torch.relu, "0 at 0")
_same("HardSwish", F.hardswish, "0 at -3, 1 at 3")


@row("Max", kinks=EVEN)
def _max(a: Any, *xs: T) -> T:
    return functools.reduce(torch.maximum, xs)


@row("Min", kinks=EVEN)
def _min(a: Any, *xs: T) -> T:
    return functools.reduce(torch.minimum, xs)


@row("Sum")
def _sum(a: Any, *xs: T) -> T:
    return torch.stack(torch.broadcast_tensors(*xs)).sum(0)


@row("Mean")
def _mean(a: Any, *xs: T) -> T:
    return torch.stack(torch.broadcast_tensors(*xs)).mean(0)


@row("Mod")
def _mod(a: Any, x: T, y: T) -> T:
    return torch.fmod(x, y) if a.fmod else torch.remainder(x, y)


@row("Clip", kinks="at a limit x has it, the limit none")
def _clip(a: Any, x: T, low: T | None = None, high: T | None = None) -> T:
    return x.clone() if low is None and high is None else torch.clamp(x, low, high)


@row("Cast")
def _cast(a: Any, x: T) -> T:
    dtypes = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}
    if a.to not in dtypes:
        raise NoForm("a number that is not real")
    return x.to(dtypes[a.to])


@row("CastLike")
def _cast_like(a: Any, x: T, y: T) -> T:
    return x.to(y.dtype)


@row("DequantizeLinear")
def _dequantize(a: Any, x: T, scale: T, zero: T | None = None) -> T:
    axis, block = int(a.axis), int(getattr(a, "block_size", 0))

    def spread(t: T) -> T:
        if t.dim() == 1:
            return t.reshape([-1 if d == axis % x.dim() else 1 for d in range(x.dim())])
        return t.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis]) if t.dim() else t

    number = x.to(scale.dtype)
    return (number if zero is None else number - spread(zero)) * spread(scale)


@row("Dropout")
def _dropout(a: Any, x: T, ratio: T | None = None, training: T | None = None) -> tuple[T, T]:
    drops = training is not None and bool(training) and (ratio is None or float(ratio) > 0)
    if drops:
        raise NoForm("a mask of the runtime's own")
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


# ---- activations


@row("Celu", kinks="1 at 0")
def _celu(a: Any, x: T) -> T:
    return F.celu(x, a.alpha)


@row("Elu", kinks="alpha at 0")
def _elu(a: Any, x: T) -> T:
    return F.elu(x, a.alpha)


@row("Selu", kinks="as a negative x at 0")
def _selu(a: Any, x: T) -> T:
    return a.gamma * F.elu(x, a.alpha)


@row("Gelu")
def _gelu(a: Any, x: T) -> T:
    return F.gelu(x, approximate=a.approximate)


@row("HardSigmoid", kinks="0 at a limit")
def _hard_sigmoid(a: Any, x: T) -> T:
    return F.hardtanh(a.alpha * x + a.beta, 0.0, 1.0)


@row("LeakyRelu", kinks="the slope at 0")
def _leaky_relu(a: Any, x: T) -> T:
    return F.leaky_relu(x, a.alpha)


@row("PRelu", kinks="the slope at 0")
def _prelu(a: Any, x: T, slope: T) -> T:
    return F.prelu(x, slope.reshape(1)) if slope.numel() == 1 else torch.where(x > 0, x, slope * x)


@row("Shrink", kinks="0 at a limit")
def _shrink(a: Any, x: T) -> T:
    if a.bias == 0:
        return F.hardshrink(x, a.lambd)
    if a.bias == a.lambd:
        return F.softshrink(x, a.lambd)
    return torch.where(x < -a.lambd, x + a.bias, torch.where(x > a.lambd, x - a.bias, 0.0))


@row("Swish")
def _swish(a: Any, x: T) -> T:
    return F.silu(x) if a.alpha == 1 else x * torch.sigmoid(a.alpha * x)


@row("SwiGLU")
def _swiglu(a: Any, gate: T, x: T) -> T:
    return _swish(a, gate) * x


@row("Binarizer")
def _binarizer(a: Any, x: T) -> T:
    return torch.where(x > a.threshold, x * 0 + 1, x * 0)


@row("ThresholdedRelu", kinks="0 at the threshold")
def _thresholded(a: Any, x: T) -> T:
    return F.threshold(x, a.alpha, 0.0)


@row("Softmax")
def _softmax(a: Any, x: T) -> T:
    return F.softmax(x, a.axis)


@row("LogSoftmax")
def _log_softmax(a: Any, x: T) -> T:
    return F.log_softmax(x, a.axis)


@row("Hardmax", kinks="0, as of any choice")
def _hardmax(a: Any, x: T) -> T:
    picked = x.argmax(a.axis, keepdim=True)
    return torch.zeros_like(x).scatter(a.axis, picked, 1.0)


# ---- reductions


def _dims(a: Any, x: T, axes: T | None) -> list[int] | None:
    """None: nothing is reduced."""
    given = ints(axes)
    if given:
        return [d % x.dim() for d in given]
    return None if a.noop_with_empty_axes else list(range(x.dim()))


def _reduction(name: str, function: Any, noop: Any = None, kinks: str = "") -> None:
    """function(x, dims, keepdim); noop(x): what is done to each element, if anything."""

    @row(name, kinks=kinks)
    def _(a: Any, x: T, axes: T | None = None) -> T:
        dims = _dims(a, x, axes)
        if dims is None:
            return x.clone() if noop is None else noop(x)
        return function(x, dims, bool(a.keepdims))


def _prod(x: T, dims: list[int], keep: bool) -> T:
    for d in sorted(dims, reverse=True):
        x = x.prod(d, keepdim=keep)
    return x


def _most(function: Any) -> Any:
    def reduce(x: T, dims: list[int], keep: bool) -> T:
        if not x.numel():
            raise NoForm("the largest of nothing")
        return function(x, dims, keep)

    return reduce


_reduction("ReduceSum", torch.sum)
_reduction("ReduceMean", torch.mean)
_reduction("ReduceProd", _prod)
_reduction("ReduceMax", _most(torch.amax), kinks=EVEN)
_reduction("ReduceMin", _most(torch.amin), kinks=EVEN)
_reduction(
    "ReduceL1", lambda x, d, k: torch.linalg.vector_norm(x, 1, d, k), torch.abs, kinks="0 at 0"
)
_reduction(
    "ReduceL2", lambda x, d, k: torch.linalg.vector_norm(x, 2, d, k), torch.abs, kinks="0 at 0"
)
_reduction("ReduceLogSum", lambda x, d, k: x.sum(d, k).log(), torch.log)
_reduction("ReduceLogSumExp", torch.logsumexp, lambda x: x.exp().log())
_reduction("ReduceSumSquare", lambda x, d, k: x.square().sum(d, k), torch.square)


@row("CumSum")
def _cumsum(a: Any, x: T, axis: T) -> T:
    return _cumulated(a, x, int(axis), torch.cumsum, 0.0)


@row("CumProd")
def _cumprod(a: Any, x: T, axis: T) -> T:
    return _cumulated(a, x, int(axis), torch.cumprod, 1.0)


def _cumulated(a: Any, x: T, dim: int, function: Any, start: float) -> T:
    x = x.flip(dim) if a.reverse else x
    if a.exclusive:
        first = torch.full_like(x.narrow(dim, 0, 1), start)
        x = torch.cat([first, x.narrow(dim, 0, x.shape[dim] - 1)], dim)
    y = function(x, dim)
    return y.flip(dim) if a.reverse else y


@row("TopK", kinks="to the elements that are taken: of ties those that torch.topk takes")
def _topk(a: Any, x: T, k: T) -> tuple[T, T]:
    return torch.topk(x, int(k), a.axis, bool(a.largest), bool(a.sorted))


# ---- products


@row("Einsum")
def _einsum(a: Any, *xs: T) -> T:
    return torch.einsum(a.equation.replace(" ", ""), *xs)


@row("Gemm")
def _gemm(a: Any, x: T, y: T, c: T | None = None) -> T:
    x, y = x.t() if a.transA else x, y.t() if a.transB else y
    return a.alpha * (x @ y) if c is None else torch.addmm(c, x, y, beta=a.beta, alpha=a.alpha)


@row("Det")
def _det(a: Any, x: T) -> T:
    return torch.linalg.det(x)


@row("DFT")
def _dft(a: Any, x: T, length: T | None = None, axis: T | None = None) -> T:
    dim = (int(axis) if axis is not None else -2) % x.dim()
    n = None if length is None else int(length)
    if a.inverse and a.onesided:
        z = torch.view_as_complex(x.contiguous())
        return torch.fft.irfft(z, n, dim).unsqueeze(-1)
    if a.onesided:
        return torch.view_as_real(torch.fft.rfft(x.squeeze(-1), n, dim))
    z = x.squeeze(-1) if x.shape[-1] == 1 else torch.view_as_complex(x.contiguous())
    return torch.view_as_real((torch.fft.ifft if a.inverse else torch.fft.fft)(z, n, dim))


@row("STFT")
def _stft(a: Any, x: T, step: T, window: T | None = None, length: T | None = None) -> T:
    size = int(length) if length is not None else len(window)  # type: ignore[arg-type]
    z = x.squeeze(-1) if x.shape[-1] == 1 else torch.view_as_complex(x.contiguous())
    y = torch.stft(
        z, size, int(step), window=window, center=False, onesided=bool(a.onesided),
        return_complex=True,
    )  # fmt: skip
    return torch.view_as_real(y.transpose(1, 2))
