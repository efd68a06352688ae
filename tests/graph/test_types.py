"""Types print and parse alike; dims behave as the polynomials they are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.graph.types import (
    Dim,
    DType,
    Size,
    Type,
    broadcast,
    divide,
    parse_dtype,
    parse_type,
    product,
    substitute,
    symbol,
)

NAMES: tuple[str, ...] = ("B", "T", "D")


@st.composite
def sizes(draw: st.DrawFn) -> Size:
    """A polynomial of at most four terms, made by the arithmetic under test."""
    total: Size = 0
    for _ in range(draw(st.integers(0, 4))):
        names = draw(st.lists(st.sampled_from(NAMES), max_size=3))
        total = total + draw(st.integers(-5, 5)) * product(symbol(n) for n in names)
    return total


assignments = st.fixed_dictionaries({name: st.integers(0, 7) for name in NAMES})


def value(size: Size, dims: dict[str, int]) -> int:
    """The number a size stands for: read off its terms, without its own arithmetic."""
    if isinstance(size, int):
        return size
    total = 0
    for names, factor in size.terms:
        term = factor
        for name in names:
            term *= dims[name]
        total += term
    return total


@given(sizes(), sizes(), assignments)
def test_arithmetic_is_that_of_the_numbers(a: Size, b: Size, dims: dict[str, int]) -> None:
    x, y = value(a, dims), value(b, dims)
    assert value(a + b, dims) == x + y
    assert value(a - b, dims) == x - y
    assert value(a * b, dims) == x * y
    assert value(-a, dims) == -x
    assert value(product([a, b, 3]), dims) == 3 * x * y


@given(sizes(), sizes(), sizes())
def test_equal_polynomials_have_equal_keys(a: Size, b: Size, c: Size) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a * b == b * a
    assert a * (b + c) == a * b + a * c
    assert a - a == 0
    assert hash(a + b) == hash(b + a)
    assert str(a + b) == str(b + a)


@given(sizes(), sizes())
def test_different_polynomials_differ_somewhere_and_in_print(a: Size, b: Size) -> None:
    """Polynomials of degree at most 3 that agree on 0..3 in each of three names are equal."""
    points = [
        dict(zip(NAMES, p, strict=True)) for p in itertools.product(range(4), repeat=len(NAMES))
    ]
    same = all(value(a, p) == value(b, p) for p in points)
    assert (a == b) == same
    assert (str(a) == str(b)) == same


@given(sizes())
def test_a_size_without_symbols_is_an_int(a: Size) -> None:
    assert isinstance(a, int) or a.symbols
    assert not isinstance(a, Dim) or all(factor != 0 for _, factor in a.terms)


@given(sizes(), sizes(), assignments)
def test_substitution_is_evaluation(a: Size, b: Size, dims: dict[str, int]) -> None:
    assert substitute(a, dims) == value(a, dims)
    inner = value(b, dims)
    assert value(substitute(a, {"B": b}), dims) == value(a, dims | {"B": inner})


@given(
    sizes(), st.lists(st.sampled_from(NAMES), max_size=2), st.integers(-4, 4).filter(bool), sizes()
)
def test_division_gives_back_a_factor(a: Size, names: list[str], n: int, rest: Size) -> None:
    single = n * product(symbol(name) for name in names)
    assert divide(a * single, single) == a
    quotient = divide(rest, single)
    assert quotient is None or quotient * single == rest


def test_division_that_cannot_be_decided_is_none() -> None:
    b, t = symbol("B"), symbol("T")
    assert divide(b, t) is None
    assert divide(b + 1, 2) is None
    assert divide(7, 2) is None
    assert divide(b * t + t, b + 1) is None  # true, but the divisor has two terms
    assert divide(b + 1, b + 1) == 1


@pytest.mark.parametrize(
    "text", ["f32[]", "i64[3]", "f64[B,T,768]", "b[B,1,T,T]", "bf16[2]", "u64[4]", "f16[B]"]
)
def test_types_print_as_they_are_written(text: str) -> None:
    assert str(parse_type(text)) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (symbol("B") * symbol("T") + 1, "B*T+1"),
        (2 * symbol("B") - 3, "2*B-3"),
        (symbol("T") - symbol("B") * symbol("B"), "-1*B*B+T"),
        (-symbol("B"), "-1*B"),
    ],
)
def test_dims_print_as_sums_of_products(size: Size, text: str) -> None:
    assert str(size) == text


def test_an_unknown_element_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"f33.*f32"):
        parse_dtype("f33")


def test_bytes_and_elements() -> None:
    assert parse_type("f32[2,3]").nbytes == 24
    assert parse_type("b[5]").nbytes == 5
    assert parse_type("i64[]").numel == 1
    with pytest.raises(ValueError, match=r"f32\[B\]"):
        _ = parse_type("f32[B]").numel
    assert parse_type("f32[B,2]").specialized({"B": 3}) == Type(DType.FLOAT, (3, 2))


@given(st.lists(st.lists(st.sampled_from([1, 2, 3]), max_size=3), min_size=1, max_size=3))
def test_broadcast_is_numpys(shapes: list[list[int]]) -> None:
    import numpy as np

    tuples = [tuple(s) for s in shapes]
    try:
        want = np.broadcast_shapes(*tuples)
    except ValueError:
        with pytest.raises(ValueError, match="do not broadcast"):
            broadcast(*tuples)
    else:
        assert broadcast(*tuples) == want


def test_two_symbols_are_never_assumed_equal() -> None:
    b, t = symbol("B"), symbol("T")
    assert broadcast((b, 1), (t,)) == (b, t)
    assert broadcast((b,), (1,)) == (b,)
    for other in (t, 2):
        with pytest.raises(ValueError, match="do not broadcast"):
            broadcast((b,), (other,))
