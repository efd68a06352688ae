"""Functions that no op of ONNX computes, by series. They are computed in fp64, since they subtract
nearly equal numbers."""

from __future__ import annotations

import math

from onward.capture.aten.call import AtenCall, table
from onward.graph.graph import Value
from onward.graph.types import DType

# log(erfc(x) exp(x^2) (1 + x/2)) for x >= 0, a polynomial of s = 4 / (2 + x) - 1 in -1..1: the
# Chebyshev fit of degree 20, within 2e-13.
_SCALED = (
    -0.6717940840566908, 0.6726432239801889, 0.04734330684137551, -0.046895610419298774,
    -0.009872689340096741, 0.00882494268421916, 0.0017589330634744753, -0.0023458541718666733,
    -0.00014624207980403704, 0.0006739112138553207, -9.376245865008555e-05,
    -0.00017508760738513564, 7.150146316022852e-05, 3.342282785199075e-05,
    -3.0432642736896467e-05, -2.1643464935484595e-06, 8.966594246349274e-06,
    -9.568997344898934e-07, -1.7232672838100742e-06, 2.3448109158325173e-07,
    1.6414068409937087e-07,
)  # fmt: skip
_SHIFT = 7  # the argument from which Stirling's series are accurate enough
# B(2n) / (2n (2n-1)) and B(2n) / 2n, n = 1..6, for the series of log gamma and of digamma
# (https://dlmf.nist.gov/5.11)
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
_SLOPE = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760)


def _precise(c: AtenCall, x: Value) -> Value:
    return c.b.cast(c.value(x, c.type.dtype), DType.DOUBLE)


def _made(c: AtenCall, y: Value) -> Value:
    return c.b.cast(y, c.type.dtype)


def _positive(c: AtenCall, x: Value) -> tuple[Value, Value]:
    """Returns whether x is below 0, and |x| with the gradient of x at 0."""
    below = c.b.Less(x, 0.0)
    return below, c.b.Where(below, c.b.Neg(x), x)


def _polynomial(c: AtenCall, x: Value, factors: tuple[float, ...]) -> Value:
    y = c.b.scalar(factors[-1], DType.DOUBLE)
    for factor in reversed(factors[:-1]):
        y = c.b.Add(c.b.Mul(y, x), factor)
    return y


def _log_scaled(c: AtenCall, x: Value) -> Value:
    """Returns log(erfc(x) exp(x^2)) for x >= 0."""
    half = c.b.Add(c.b.Mul(x, 0.5), 1.0)
    s = c.b.Sub(c.b.Div(c.b.scalar(2.0, DType.DOUBLE), half), 1.0)
    return c.b.Sub(_polynomial(c, s, _SCALED), c.b.Log(half))


def _complement(c: AtenCall, x: Value) -> Value:
    below, size = _positive(c, x)
    tail = c.b.Exp(c.b.Sub(_log_scaled(c, size), c.b.Mul(size, size)))
    return c.b.Where(below, c.b.Sub(2.0, tail), tail)


def _erfc(c: AtenCall, x: Value) -> Value:
    return _made(c, _complement(c, _precise(c, x)))


def _erfcx(c: AtenCall, x: Value) -> Value:
    x = _precise(c, x)
    below, size = _positive(c, x)
    scaled = c.b.Exp(_log_scaled(c, size))
    # 0 for x >= 0, where the exponential of a large square would overflow
    square = c.b.Mul(x, c.b.Where(below, x, 0.0))
    return _made(c, c.b.Where(below, c.b.Sub(c.b.Mul(c.b.Exp(square), 2.0), scaled), scaled))


def _log_ndtr(c: AtenCall, x: Value) -> Value:
    """The log of the standard normal cumulative distribution: log(erfc(-x / sqrt 2) / 2)."""
    u = c.b.Mul(_precise(c, x), -math.sqrt(0.5))
    above = c.b.Greater(u, 0.0)
    low = c.b.Where(above, u, 0.0)
    tail = c.b.Sub(c.b.Sub(_log_scaled(c, low), c.b.Mul(low, low)), math.log(2.0))
    rest = _complement(c, c.b.Where(above, 0.0, c.b.Neg(u)))
    return _made(c, c.b.Where(above, tail, c.b.Log1p(c.b.Mul(rest, -0.5))))


def _reflected(c: AtenCall, x: Value) -> tuple[Value, Value, Value]:
    """Returns, for the reflection formula, whether x is above 0; x there, 1 - x elsewhere; and the
    angle pi (x - round(x)) where x is not above 0."""
    above = c.b.Greater(x, 0.0)
    far = c.b.Where(above, x, c.b.Sub(1.0, x))
    angle = c.b.Mul(c.b.Sub(x, c.b.Round(x)), math.pi)
    return above, far, c.b.Where(above, 1.0, angle)


def _series(c: AtenCall, z: Value, factors: tuple[float, ...]) -> Value:
    """Returns the sum over n of factors[n] / z^(2n)."""
    once = c.b.Reciprocal(z)
    return _polynomial(c, c.b.Mul(once, once), factors)


def _lgamma(c: AtenCall, x: Value) -> Value:
    above, far, angle = _reflected(c, _precise(c, x))
    z = c.b.Add(far, float(_SHIFT))
    product = far
    for i in range(1, _SHIFT):
        product = c.b.Mul(product, c.b.Add(far, float(i)))
    y = c.b.Sub(c.b.Mul(c.b.Sub(z, 0.5), c.b.Log(z)), z)
    y = c.b.Add(c.b.Add(y, 0.5 * math.log(2 * math.pi)), c.b.Div(_series(c, z, _STIRLING), z))
    y = c.b.Sub(y, c.b.Log(product))
    other = c.b.Sub(c.b.Sub(math.log(math.pi), c.b.Log(c.b.Abs(c.b.Sin(angle)))), y)
    return _made(c, c.b.Where(above, y, other))


def _digamma(c: AtenCall, x: Value) -> Value:
    above, far, angle = _reflected(c, _precise(c, x))
    z = c.b.Add(far, float(_SHIFT))
    y = c.b.Sub(c.b.Log(z), c.b.Div(0.5, z))
    y = c.b.Sub(y, c.b.Div(_series(c, z, _SLOPE), c.b.Mul(z, z)))
    for i in range(_SHIFT):
        y = c.b.Sub(y, c.b.Reciprocal(c.b.Add(far, float(i))))
    turned = c.b.Div(c.b.Mul(c.b.Cos(angle), math.pi), c.b.Sin(angle))
    return _made(c, c.b.Where(above, y, c.b.Sub(y, turned)))


TABLE = table(
    {
        _erfc: "erfc.default",
        _erfcx: "special_erfcx.default",
        _log_ndtr: "special_log_ndtr.default",
        _lgamma: "lgamma.default",
        _digamma: "digamma.default",
    }
)
