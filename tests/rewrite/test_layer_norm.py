"""Layer norms that exporters write out become LayerNormalization; onnx's evaluator is the oracle of
what they compute."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from exported import numbers, rewritten

MEANS = {
    "a mean": "{y} = ReduceMean <keepdims = 1> ({x}, last)",
    "a sum over the count": "{y}_s = ReduceSum <keepdims = 1> ({x}, last) {y} = Div ({y}_s, four)",
    "a flat sum over the count": "{y}_s = ReduceSum <keepdims = 0> ({x}, last) "
    "{y}_d = Div ({y}_s, four) {y} = Unsqueeze ({y}_d, last)",
    "a flat mean": "{y}_s = ReduceMean <keepdims = 0> ({x}, last) {y} = Unsqueeze ({y}_s, last)",
}
SQUARES = {"x x": "v = Mul (d, d)", "a power": "v = Pow (d, two)"}
INVERSES = {"reciprocal": "i = Reciprocal (root)", "one over": "i = Div (one, root)"}
# the norm `n`, which has the scale where `a` has it; `{mean}` is the mean's own name
ENDS = {
    "apart over root": "n = Div (d, root)",
    "apart times inverse": "n = Mul (d, i)",
    "apart times scaled": "a = Mul (i, scale) n = Mul (a, d)",
    "two products": "a = Mul (scale, i) p = Mul (x, a) m = Mul (mean, a) n = Sub (p, m)",
    "two products, negated": "a = Mul (i, scale) g = Neg (mean) p = Mul (a, x) m = Mul (g, a) "
    "n = Add (p, m)",
    "two products, no scale": "p = Mul (x, i) m = Mul (i, mean) n = Sub (p, m)",
}
BIASED = {
    "bias first": "a = Mul (i, scale) p = Mul (x, a) m = Mul (mean, a) t = Sub (bias, m) "
    "y = Add (p, t)",
    "bias first, negated": "a = Mul (i, scale) g = Neg (mean) p = Mul (x, a) m = Mul (g, a) "
    "t = Add (m, bias) y = Add (t, p)",
    "bias first, no scale": "g = Neg (mean) p = Mul (x, i) m = Mul (g, i) t = Add (bias, m) "
    "y = Add (p, t)",
}
WEIGHTS = {
    "none": "y = Identity (n)",
    "a scale": "y = Mul (n, factor)",
    "a bias": "y = Add (bias, n)",
    "both": "s = Mul (factor, n) y = Add (s, bias)",
}


def norm(mean: str, square: str, inverse: str, end: str, shape: str = "4") -> str:
    variance = MEANS[mean].format(y="var", x="v").replace("mean", "var")
    return (
        f"model (float[B, 3, 4] x, float[{shape}] scale, float[4] factor, float[{shape}] bias) => "
        "(float[B, 3, 4] y) <float two = {2.0}, float one = {1.0}, float four = {4.0}, "
        "float little = {0.01}, int64[1] last = {-1}> "
        f"{{ {MEANS[mean].format(y='mean', x='x')} d = Sub (x, mean) {SQUARES[square]} {variance} "
        f"sum = Add (var, little) root = Sqrt (sum) {INVERSES[inverse]} {end} }}"
    )


def feeds(shape: tuple[int, ...] = (4,)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    made = {"scale": shape, "factor": (4,), "bias": shape}
    held = {name: rng.standard_normal(s).astype(np.float32) for name, s in made.items()}
    return {"x": numbers(2, 3, 4) + 1, **held}


PLAIN = [*itertools.product(MEANS, SQUARES, INVERSES, ENDS, WEIGHTS)]


@pytest.mark.parametrize("case", PLAIN, ids="-".join)
def test_a_norm_written_out(case: tuple[str, ...]) -> None:
    mean, square, inverse, end, weights = case
    found = rewritten(norm(mean, square, inverse, f"{ENDS[end]} {WEIGHTS[weights]}"), feeds())
    assert found[0] == "LayerNormalization"
    # a norm that has its scale already is multiplied by another one as it was
    again = "scale" in ENDS[end] and "factor" in WEIGHTS[weights]
    assert len(found) == (1 + weights.count("scale") + 2 * (weights == "both") if again else 1)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (1, 1, 4)], ids=str)
@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("end", BIASED)
def test_a_norm_whose_bias_comes_first(end: str, inverse: str, shape: tuple[int, ...]) -> None:
    text = norm("a mean", "x x", inverse, BIASED[end], ", ".join(map(str, shape)))
    assert rewritten(text, feeds(shape))[-1] == "LayerNormalization"


OTHERS = {
    "another mean is taken off": ("d = Sub (x, mean)", "e = Add (mean, one) d = Sub (x, e)"),
    "another count": ("float four = {4.0}", "float four = {3.0}"),
    "the sum over all dims": ("int64[1] last = {-1}", "int64[2] last = {-2, -1}"),
    "a cube": ("v = Mul (d, d)", "c = Mul (d, d) v = Mul (c, d)"),
    "a negative epsilon": ("little = {0.01}", "little = {-0.01}"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_norm_stays(name: str) -> None:
    mean = "a sum over the count" if "count" in name else "a mean"
    text = norm(mean, "x x", "reciprocal", "y = Mul (d, i)")
    old, new = OTHERS[name]
    assert old in text
    with np.errstate(all="ignore"):
        assert "LayerNormalization" not in rewritten(text.replace(old, new), feeds())


def test_a_norm_that_is_read_twice_keeps_what_is_read() -> None:
    end = "n = Mul (d, i) s = Mul (n, factor) y = Add (s, n)"
    found = rewritten(norm("a mean", "x x", "reciprocal", end), feeds())
    assert sorted(found) == ["Add", "LayerNormalization", "Mul"]


def test_a_weight_that_adds_a_dim_stays_apart() -> None:
    text = norm("a mean", "x x", "reciprocal", "n = Mul (d, i) y = Mul (n, scale)", "1, 1, 1, 4")
    text = text.replace("float[B, 3, 4] y", "float[1, B, 3, 4] y")
    found = rewritten(text, feeds((1, 1, 1, 4)))
    assert found[-1] == "Mul"
