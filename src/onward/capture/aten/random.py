"""Random numbers and dropout. Each op that draws is a site with a number, by which its random
numbers differ from those of other sites in the step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.random_sites import dropout, random_site
from onward.graph.types import DType, Size, Type


def site_of(c: AtenCall, x: Value) -> dict[str, Any]:
    """Returns what the next site draws by, for a tensor of x's shape (`random_site`)."""
    return random_site(c.b, x, _next(c), c.t.batch_size)


def _next(c: AtenCall) -> int:
    """Returns the number of the next site."""
    site, c.t.sites = c.t.sites, c.t.sites + 1
    return site


def _dropout(c: AtenCall, x: Value, ratio: float, train: bool) -> Value:
    if not train or ratio == 0.0:
        return x
    if "feature" in str(c.node.target):  # whole channels: x f[N,C,*S]
        shape = type_of(x).shape
        ones = c.b.full(1.0, Type(type_of(x).dtype, (*shape[:2], *[1] * len(shape[2:]))))
        return c.b.Mul(x, dropped(c, ones, ratio))
    return dropped(c, x, ratio)


def dropped(c: AtenCall, x: Value, ratio: float) -> Value:
    """Returns x after dropout with probability `ratio`, at the next site."""
    return dropout(c.b, x, float(ratio), _next(c), c.t.batch_size)


def _native_dropout(c: AtenCall, x: Value, ratio: float, train: bool | None) -> list[Value]:
    """Returns x after dropout, and the mask of the elements that are kept."""
    ones = c.b.full(1.0, type_of(x))
    if not train or ratio == 0.0:
        return [x, c.b.full(True, Type(DType.BOOL, type_of(x).shape))]
    kept = dropped(c, ones, ratio)
    return [c.b.Mul(x, kept), c.b.Greater(kept, c.b.scalar(0.0, type_of(x).dtype))]


def uniform(c: AtenCall, type: Type) -> Value:
    """Returns uniform random numbers in [0, 1) of this type, at the next site."""
    shape, batch = type.shape, c.t.batch_size
    last = not shape or (shape[-1] == batch and batch not in shape[:-1])
    wide = type.with_shape((*shape, 1)) if last else type  # the dim of samples may not be last
    like = c.b.full(0.0, wide)
    r = site_of(c, like)
    y = c.b.RandomUniform(like, r["seed"], r["offset"], site=r["site"], sample_dim=r["sample_dim"])
    return c.b.reshape(y, shape)


def _of_a_generator(generator: Any) -> None:
    if generator is not None:
        raise CaptureError(
            "it draws random numbers from an explicit torch.Generator; fix: leave out "
            "generator=, or draw before the step and pass the numbers as an input of the "
            "batch"
        )


def _rand(c: AtenCall, *_: Any, generator: Any = None, **__: Any) -> Value:
    _of_a_generator(generator)
    return uniform(c, c.type)


def _uniform(
    c: AtenCall, x: Value, low: float = 0.0, high: float = 1.0, generator: Any = None
) -> Value:
    _of_a_generator(generator)
    return c.b.Add(c.b.Mul(uniform(c, type_of(x)), high - low), low)


def _bernoulli(c: AtenCall, x: Value, generator: Any = None) -> Value:
    """Draws 1 with probability x, else 0."""
    return _bernoulli_of(c, x, x, generator)


def _bernoulli_of(c: AtenCall, x: Value, p: Any = 0.5, generator: Any = None) -> Value:
    _of_a_generator(generator)
    type = c.type if c.type.is_floating else Type(DType.FLOAT, c.type.shape)
    drawn = uniform(c, type)
    return c.b.cast(c.b.Less(drawn, c.value(p, type.dtype)), c.type.dtype)


def _standard_normal(c: AtenCall, type: Type) -> Value:
    """Draws standard normal numbers by Box-Muller (https://doi.org/10.1214/aoms/1177706645)."""
    first, second = uniform(c, type), uniform(c, type)
    radius = c.b.Sqrt(c.b.Mul(c.b.Log(c.b.Sub(c.b.scalar(1.0, type.dtype), first)), -2.0))
    return c.b.Mul(radius, c.b.Cos(c.b.Mul(second, 2.0 * math.pi)))


def _randn(c: AtenCall, *_: Any, generator: Any = None, **__: Any) -> Value:
    _of_a_generator(generator)
    return _standard_normal(c, c.type)


def _normal(
    c: AtenCall, x: Value, mean: float = 0.0, std: float = 1.0, generator: Any = None
) -> Value:
    _of_a_generator(generator)
    return c.b.Add(c.b.Mul(_standard_normal(c, type_of(x)), std), mean)


def _normal_of_numbers(
    c: AtenCall, mean: float, std: float, *_: Any, generator: Any = None, **__: Any
) -> Value:
    _of_a_generator(generator)
    return c.b.Add(c.b.Mul(_standard_normal(c, c.type), std), mean)


def _randperm(c: AtenCall, n: Size, *_: Any, generator: Any = None, **__: Any) -> Value:
    """A random permutation i64[n]: the order of n random numbers."""
    _of_a_generator(generator)
    drawn = uniform(c, Type(DType.FLOAT, (n,)))
    return c.b.cast(c.b.TopK(drawn, c.b.size(n), axis=0, largest=1, sorted=1)[1], c.type.dtype)


def _multinomial(
    c: AtenCall, p: Value, count: Size, replacement: bool = False, generator: Any = None
) -> Value:
    """Draws column indices of p f[*,K] with probabilities proportional to p. Without replacement,
    those with the smallest of exponential variables with rates p."""
    _of_a_generator(generator)
    dtype, last = type_of(p).dtype, type_of(p).rank - 1
    if not replacement:
        drawn = c.b.Max(uniform(c, type_of(p)), c.b.scalar(2.0**-25, dtype))
        rank = c.b.Div(p, c.b.Neg(c.b.Log(drawn)))
        return c.b.TopK(rank, c.b.size(count), axis=last, largest=1, sorted=1)[1]
    ends = c.b.CumSum(p, np.array(last, dtype=np.int64))
    total = c.b.slice(ends, last, type_of(p).shape[last] - 1, type_of(p).shape[last])
    drawn = c.b.Mul(uniform(c, Type(dtype, c.type.shape)), total)
    below = c.b.LessOrEqual(c.b.unsqueeze(ends, [last]), c.b.unsqueeze(drawn, [last + 1]))
    return c.b.reduce_sum(c.b.cast(below, DType.INT64), [last + 1], keepdims=False)


def _exponential(c: AtenCall, x: Value, rate: float = 1.0, generator: Any = None) -> Value:
    """Draws exponential numbers above 0, whose logarithm models take (Gumbel distribution)."""
    _of_a_generator(generator)
    drawn = uniform(c, type_of(x))
    above = c.b.Max(drawn, c.b.scalar(2.0**-25, type_of(x).dtype))
    return c.b.Div(c.b.Neg(c.b.Log(above)), rate)


def _whole_numbers(c: AtenCall, low: int, high: int, generator: Any) -> Value:
    _of_a_generator(generator)
    if not all(isinstance(n, int) for n in (low, high)) or high - low > 1 << 24:
        raise CaptureError(
            "randint over more than 2^24 values, or with a bound that varies, "
            "has no translation; fix: draw before the step and pass the "
            "numbers as an input of the batch"
        )
    drawn = uniform(c, Type(DType.FLOAT, c.type.shape))
    below = c.b.Min(c.b.Floor(c.b.Mul(drawn, float(high - low))), float(high - low - 1))
    return c.b.Add(c.b.cast(below, c.type.dtype), low)


def _randint(c: AtenCall, high: int, *_: Any, generator: Any = None, **__: Any) -> Value:
    return _whole_numbers(c, 0, high, generator)


def _randint_low(
    c: AtenCall, low: int, high: int, *_: Any, generator: Any = None, **__: Any
) -> Value:
    return _whole_numbers(c, low, high, generator)


def _randint_like(c: AtenCall, x: Value, high: int, **_: Any) -> Value:
    return _whole_numbers(c, 0, high, None)


def _randint_like_low(c: AtenCall, x: Value, low: int, high: int, **_: Any) -> Value:
    return _whole_numbers(c, low, high, None)


TABLE = table(
    {
        _dropout: "dropout.default dropout_.default feature_dropout.default "
        "feature_dropout_.default",
        _native_dropout: "native_dropout.default",
        _rand: "rand.default rand_like.default",
        _uniform: "uniform.default",
        _bernoulli: "bernoulli.default",
        _bernoulli_of: "bernoulli.p bernoulli_.float bernoulli_.Tensor",
        _randn: "randn.default randn_like.default",
        _normal: "normal_.default",
        _normal_of_numbers: "normal.float_float",
        _randperm: "randperm.default",
        _multinomial: "multinomial.default",
        _exponential: "exponential.default",
        _randint: "randint.default",
        _randint_low: "randint.low",
        _randint_like: "randint_like.default",
        _randint_like_low: "randint_like.low_dtype",
    }
)
