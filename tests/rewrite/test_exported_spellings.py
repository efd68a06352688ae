"""What exporters write of a layer becomes the op that a layer is captured as; onnx's evaluator is
the oracle of what it computes."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from exported import numbers, rewritten

LOWEST = float(np.finfo(np.float32).min)

FACTORS = {
    "x/2 one": "h = Mul (x, half) y = Mul (h, one)",
    "one x/2": "h = Mul (half, x) y = Mul (one, h)",
    "(x one)/2": "h = Mul (x, one) y = Mul (h, half)",
    "(x one) over 2": "h = Mul (one, x) y = Div (h, two)",
    "half one x": "h = Mul (half, one) y = Mul (h, x)",
    "x over 2, one": "h = Div (x, two) y = Mul (h, one)",
}
INNER = {"over a root": "s = Div (x, root)", "times its inverse": "s = Mul (inverse, x)"}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("order", ["Add (e, unit)", "Add (unit, e)"])
def test_a_gelu_by_erf(inner: str, factors: str, order: str) -> None:
    text = (
        "model (float[B, 4] x) => (float[B, 4] y) <float half = {0.5}, float two = {2.0}, "
        f"float unit = {{1.0}}, float root = {{{2**0.5}}}, float inverse = {{{0.5**0.5}}}> "
        f"{{ {INNER[inner]} e = Erf (s) one = {order} {FACTORS[factors]} }}"
    )
    assert rewritten(text, {"x": numbers(3, 4)}) == ["Gelu"]


def test_two_over_x_is_no_half_of_x() -> None:
    text = (
        "model (float[B, 4] x) => (float[B, 4] y) <float two = {2.0}, float unit = {1.0}, "
        f"float root = {{{2**0.5}}}> {{ s = Div (x, root) e = Erf (s) one = Add (e, unit) "
        "h = Div (two, x) y = Mul (h, one) }"
    )
    assert "Gelu" not in rewritten(text, {"x": numbers(3, 4)})


@pytest.mark.parametrize("last", ["Neg (h)", "Tanh (h)", "Sum (h)", "Sub (h, unit)"])
def test_twice_a_gelu_that_others_read(last: str) -> None:
    """The product lacks its half, and what reads it may have one input alone."""
    text = (
        "model (float[B, 4] x) => (float[B, 4] y) <float unit = {1.0}, "
        f"float root = {{{2**0.5}}}> {{ s = Div (x, root) e = Erf (s) one = Add (e, unit) "
        f"h = Mul (x, one) y = {last} }}"
    )
    assert "Gelu" not in rewritten(text, {"x": numbers(3, 4)})


@pytest.mark.parametrize("change", ["{1.5}", "{1.0}"])
def test_what_is_no_gelu_stays(change: str) -> None:
    text = (
        "model (float[B, 4] x) => (float[B, 4] y) <float half = {0.5}, float unit = {1.0}, "
        f"float root = {change}> {{ s = Div (x, root) e = Erf (s) one = Add (e, unit) "
        "h = Mul (x, half) y = Mul (h, one) }"
    )
    assert "Gelu" not in rewritten(text, {"x": numbers(3, 4)})


@pytest.mark.parametrize("first", ["bias, p", "p, bias"])
def test_a_bias_goes_into_its_product(first: str) -> None:
    text = (
        "model (float[B, T, 4] x, float[4, 5] w, float[5] bias) => (float[B, T, 5] y) "
        f"{{ p = MatMul (x, w) y = Add ({first}) }}"
    )
    feeds = {"x": numbers(2, 3, 4), "w": numbers(4, 5), "bias": numbers(5)}
    found = rewritten(text, feeds)
    assert found.count("Gemm") == 1 and not {"Add", "MatMul"} & set(found)


OTHERS = {
    "a product that is read twice": "q = Add (p, bias) y = Mul (q, p)",
    "a bias for each row": "y = Add (p, rows)",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay(name: str) -> None:
    text = (
        "model (float[3, 4] x, float[4, 5] w, float[5] bias, float[3, 1] rows) => (float[3, 5] y) "
        f"{{ p = MatMul (x, w) {OTHERS[name]} }}"
    )
    feeds = {"x": numbers(3, 4), "w": numbers(4, 5), "bias": numbers(5), "rows": numbers(3, 1)}
    assert "Add" in rewritten(text, feeds)


SCALES = {
    "of the scores": "p = MatMul (q, t) s = Mul (p, quarter)",
    "of both factors": "a = Mul (q, half) b = Mul (half, t) s = MatMul (a, b)",
    "of one, and of the scores": "a = Div (q, two) p = MatMul (a, t) s = Mul (p, half)",
}
MASKS = {
    "none": "m = Identity (s)",
    "minus infinity": "w = Where (keep, zero, infinite) m = Add (s, w)",
    "the lowest number": "w = Where (keep, zero, lowest) m = Add (w, s)",
    "hidden ones": "h = Not (keep) w = Where (h, lowest, zero) m = Add (s, w)",
    "filled": "m = Where (keep, s, infinite)",
    "two of them": "w = Where (keep, zero, lowest) i = Add (s, w) "
    "w2 = Where (also, zero, lowest) m = Add (i, w2)",
    "a bias before": "i = Add (s, bias) w = Where (keep, zero, lowest) m = Add (i, w)",
    "a bias behind": "w = Where (keep, zero, infinite) i = Add (s, w) m = Add (i, bias)",
}
ENDS = {"as it is": "r = Identity (a)", "without NaN": "n = IsNaN (a) r = Where (n, zero, a)"}


@pytest.mark.parametrize("case", [*itertools.product(SCALES, MASKS, ENDS)], ids="-".join)
def test_attention_written_out(case: tuple[str, str, str]) -> None:
    """Also of a query to which every key is hidden, where the spelling has a number for it."""
    scale, mask, end = case
    text = (
        "model (float[B, 2, T, 4] q, float[B, 2, T, 4] k, float[B, 2, T, 4] v, bool[B, 1, T, T] "
        "keep, bool[B, 1, 1, T] also, float[1, 2, T, T] bias) => (float[B, 2, T, 4] y) "
        "<float half = {0.5}, float quarter = {0.25}, "
        f"float two = {{2.0}}, float zero = {{0.0}}, float lowest = {{{LOWEST!r}}}> "
        "{ none = Log (zero) infinite = Identity (none) t = Transpose <perm = [0, 1, 3, 2]> (k) "
        f"{SCALES[scale].replace('a = ', 'f = ').replace('(a,', '(f,').replace('b = ', 'g = ')}"
        f" {MASKS[mask]} a = Softmax <axis = -1> (m) {ENDS[end]} y = MatMul (r, v) }}"
    ).replace(", b)", ", g)")
    keep = np.random.default_rng(1).random((2, 1, 3, 3)) < 0.7
    keep |= np.eye(3, dtype=bool)
    if mask not in ("none",) and (
        end == "without NaN" or mask in ("the lowest number", "hidden ones")
    ):
        keep[1, 0, 1] = False
    feeds = {"q": numbers(2, 2, 3, 4), "k": numbers(2, 2, 3, 4) * 2, "v": numbers(2, 2, 3, 4)}
    feeds["also"] = np.array([[[[True, False, True]]], [[[True, True, True]]]])
    feeds["bias"] = numbers(1, 2, 3, 3)
    with np.errstate(all="ignore"):
        found = rewritten(text, {**feeds, "keep": keep})
    alone = mask not in ("none", "two of them", "a bias before", "a bias behind")
    fused = end == "as it is" or alone
    assert ("FlashAttention" in found) == fused


FILLS = {
    "keeps": "w = {wide} (keep) m = Where (w, s, infinite)",
    "hides": "w = {wide} (hide) m = Where (w, infinite, s)",
    "no longer keeps": "o = Not (keep) w = {wide} (o) m = Where (w, infinite, s)",
    "keeps no longer": "w = {wide} (keep) o = Not (w) m = Where (o, infinite, s)",
    "no longer hides": "w = {wide} (hide) o = Not (w) m = Where (o, s, infinite)",
}
SHAPES = [*itertools.product((1, 2), (1, 2), (1, 3), (1, 3))]


@pytest.mark.parametrize("wide", ["Identity", "Expand"])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mask_of_any_shape_that_broadcasts(shape: tuple[int, ...], fill: str, wide: str) -> None:
    """The mask has dims of samples, heads, queries and keys; exporters expand it or not."""
    sizes = ", ".join(map(str, shape))
    text = (
        f"model (float[2, 2, 3, 4] q, float[2, 2, 3, 4] k, float[2, 2, 3, 4] v, bool[{sizes}] "
        f"keep, bool[{sizes}] hide) => (float[2, 2, 3, 4] y) "
        "<float zero = {0.0}, int64[4] whole = {2, 2, 3, 3}> "
        "{ none = Log (zero) infinite = Identity (none) t = Transpose <perm = [0, 1, 3, 2]> (k) "
        f"s = MatMul (q, t) {FILLS[fill].format(wide=wide)} "
        "a = Softmax <axis = -1> (m) y = MatMul (a, v) }"
    )
    text = re.sub(r"Expand \((\w+)\)", r"Expand (\1, whole)", text)
    keep = np.random.default_rng(1).random(shape) < 0.6
    keep[..., 0] = True
    feeds = {"q": numbers(2, 2, 3, 4), "k": numbers(2, 2, 3, 4) * 2, "v": numbers(2, 2, 3, 4)}
    with np.errstate(all="ignore"):
        found = rewritten(text, {**feeds, "keep": keep, "hide": ~keep})
    assert "FlashAttention" in found


TURNED = {
    "q k^T": "qs = Mul (q, half) t = Transpose <perm = [0, 2, 3, 1]> (k) "
    "qt = Transpose <perm = [0, 2, 1, 3]> (qs) s = MatMul (qt, t)",
    "k q^T, transposed": "qs = Mul (q, half) kt = Transpose <perm = [0, 2, 1, 3]> (k) "
    "qt = Transpose <perm = [0, 2, 3, 1]> (qs) p = MatMul (kt, qt) "
    "s = Transpose <perm = [0, 1, 3, 2]> (p)",
}
MASKED = {
    "shown": ("m = Where (keep, s, low)", "r = Where (keep, a, zero)"),
    "hidden": ("m = Where (hide, low, s)", "r = Where (hide, zero, a)"),
    "written twice": ("x1 = Not (hide) m = Where (x1, s, low)", "x2 = Not (hide) "
                      "r = Where (x2, a, zero)"),
    "once": ("m = Where (keep, s, low)", "r = Identity (a)"),
    "not the same": ("m = Where (keep, s, low)", "r = Where (also, a, zero)"),
    "a low score": ("m = Where (keep, s, minus)", "r = Where (keep, a, zero)"),
}  # fmt: skip
UNFUSED = ("not the same", "a low score")


@pytest.mark.parametrize("masks", MASKED)
@pytest.mark.parametrize("turned", TURNED)
def test_attention_as_keras_writes_it(turned: str, masks: str) -> None:
    """Probabilities that hidden keys have are replaced by zeros, also where every key is hidden."""
    fill, zeros = MASKED[masks]
    text = (
        "model (float[B, T, 2, 4] q, float[B, T, 2, 4] k, float[B, T, 2, 4] v, bool[B, 1, T, T] "
        "keep, bool[B, 1, T, T] hide, bool[1, 1, T, T] also) => (float[B, T, 2, 4] y) "
        "<float half = {0.5}, float zero = {0.0}, float low = {-1e9}, float minus = {-100.0}> "
        f"{{ {TURNED[turned]} {fill} a = Softmax <axis = -1> (m) {zeros} "
        "vt = Transpose <perm = [0, 2, 1, 3]> (v) o = MatMul (r, vt) "
        "y = Transpose <perm = [0, 2, 1, 3]> (o) }"
    )
    keep = np.random.default_rng(1).random((2, 1, 3, 3)) < 0.7
    keep[1, 0, 1] = False
    rng = np.random.default_rng(4)
    feeds = {x: rng.standard_normal((2, 3, 2, 4)).astype(np.float32) for x in ("q", "k", "v")}
    feeds |= {"keep": keep, "hide": ~keep, "also": np.tri(3, dtype=bool)[None, None]}
    found = rewritten(text, feeds)
    assert ("FlashAttention" in found) == (masks not in UNFUSED)
    if masks not in UNFUSED:
        assert "Mul" not in found, "the factor of q is the scale"


@pytest.mark.parametrize("first", ["h, bias", "bias, h"])
def test_a_bias_of_heads_goes_into_its_product(first: str) -> None:
    text = (
        "model (float[B, 3, 4] x, float[4, 2, 5] w, float[2, 5] bias) => (float[B, 3, 2, 5] y) "
        "<int64[2] flat = {4, 10}, int64[4] heads = {0, 0, 2, 5}> "
        f"{{ f = Reshape (w, flat) p = MatMul (x, f) h = Reshape (p, heads) y = Add ({first}) }}"
    )
    feeds = {"x": numbers(2, 3, 4), "w": numbers(4, 2, 5), "bias": numbers(2, 5)}
    assert "Add" not in rewritten(text, feeds)


def test_a_number_per_row_and_feature_stays() -> None:
    text = (
        "model (float[4, 3] x, float[3, 6] w, float[4, 6] bias) => (float[2, 4, 6] y) "
        "<int64[3] rows = {2, 4, 3}, int64[3] wide = {2, 4, 6}> "
        "{ z = Concat <axis = 0> (x, x) p = MatMul (z, w) h = Reshape (p, wide) y = Add (h, bias) }"
    )
    feeds = {"x": numbers(4, 3), "w": numbers(3, 6), "bias": numbers(4, 6)}
    assert "Add" in rewritten(text, feeds)
