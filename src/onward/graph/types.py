"""Types of values: an element type and a shape whose dims are integer polynomials.

The notation is `dtype[dims]` everywhere: `f32[B,T,768]`, `i64[]`, `b[B,1,T,T]`. A dim is an `int`
or a `Dim`, a polynomial with integer coefficients over named symbols (`B*T`, `T+1`). Reshapes,
concatenations and slices of such sizes give such sizes, and equal polynomials have equal keys, so
that comparing two shapes is comparing two tuples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

DType = ir.DataType

_SHORT: dict[DType, str] = {
    DType.FLOAT: "f32",
    DType.DOUBLE: "f64",
    DType.FLOAT16: "f16",
    DType.BFLOAT16: "bf16",
    DType.INT8: "i8",
    DType.INT16: "i16",
    DType.INT32: "i32",
    DType.INT64: "i64",
    DType.UINT8: "u8",
    DType.UINT32: "u32",
    DType.UINT64: "u64",
    DType.BOOL: "b",
}
_LONG = {short: dtype for dtype, short in _SHORT.items()}
FLOATING = frozenset({DType.FLOAT, DType.DOUBLE, DType.FLOAT16, DType.BFLOAT16})
MOST_TERMS = 512  # of a size; models have some ten
MOST_FACTORS = 64  # of a term
LOW = frozenset({DType.FLOAT16, DType.BFLOAT16})  # stored in two bytes, computed in f32

_Monomial: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Dim:
    """A non-constant polynomial over named sizes: `((('B', 'T'), 1), ((), 1))` is `B*T+1`.

    at: its value at the sizes of a plan, once these are settled. It is carried through arithmetic
    and ignored by equality.
    """

    terms: tuple[tuple[_Monomial, int], ...]
    at: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        parts: list[str] = []
        for names, factor in self.terms:
            body = "*".join(names)
            text = str(factor) if not names else body if factor == 1 else f"{factor}*{body}"
            parts.append(text if not parts or text.startswith("-") else "+" + text)
        return "".join(parts)

    __repr__ = __str__

    def __add__(self, other: Size) -> Size:
        at = _known(self, other, lambda a, b: a + b)
        return _sum(_terms(self) + _terms(other), at)

    __radd__ = __add__

    def __mul__(self, other: Size) -> Size:
        if isinstance(other, Dim) and len(self.terms) * len(other.terms) > MOST_TERMS**2 // 8:
            raise ValueError(f"a size has more than {MOST_TERMS} terms")
        at = _known(self, other, lambda a, b: a * b)
        return _sum(
            [(tuple(sorted(a + b)), p * q) for a, p in _terms(self) for b, q in _terms(other)], at
        )

    __rmul__ = __mul__

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Size) -> Size:
        return self + (-other)

    def __rsub__(self, other: Size) -> Size:
        return (-self) + other

    def number(self, dims: Mapping[str, int]) -> int:
        """The dim's value at these sizes, which must include every symbol."""
        return sum(factor * math.prod(dims[n] for n in names) for names, factor in self.terms)

    @property
    def multiple(self) -> tuple[str, int]:
        """The name and factor of a dim: `("T", 8)` for `8*T`; for other dims their printed form and
        1."""
        (names, factor), *more = self.terms
        return (str(self), 1) if more or len(names) != 1 else (names[0], factor)

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset(name for names, _ in self.terms for name in names)


Size: TypeAlias = int | Dim
Shape: TypeAlias = tuple[Size, ...]


def symbol(name: str, at: int | None = None) -> Dim:
    """The dim that is the size called `name`."""
    return Dim((((name,), 1),), at)


def value(size: Size) -> int:
    """A size as a number. Raises ValueError where it is symbolic and not settled."""
    number = size.at if isinstance(size, Dim) else size
    if number is None:
        raise ValueError(f"the size {size} is not settled")
    return number


def _known(a: Size, b: Size, function: Callable[[int, int], int]) -> int | None:
    """A function of two sizes' numbers; None where one of them is not settled."""
    left = a.at if isinstance(a, Dim) else a
    right = b.at if isinstance(b, Dim) else b
    return None if left is None or right is None else function(left, right)


def _terms(size: Size) -> list[tuple[_Monomial, int]]:
    if isinstance(size, Dim):
        return list(size.terms)
    return [((), int(size))] if size else []


def _sum(terms: Iterable[tuple[_Monomial, int]], at: int | None = None) -> Size:
    total: dict[_Monomial, int] = {}
    for names, factor in terms:
        total[names] = total.get(names, 0) + factor
    kept = sorted(
        ((n, f) for n, f in total.items() if f), key=lambda term: (-len(term[0]), term[0])
    )
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    if len(kept) > MOST_TERMS or any(len(n) > MOST_FACTORS or abs(f) >> 63 for n, f in kept):
        raise ValueError(
            f"a size has more than {MOST_TERMS} terms of {MOST_FACTORS} factors, or a factor of "
            "more than 63 bits"
        )
    return Dim(tuple(kept), at)


def product(sizes: Iterable[Size]) -> Size:
    """The number of elements of a shape."""
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def divide(a: Size, b: Size) -> Size | None:
    """The quotient `a / b`, if `b` is a single term that divides every term of `a`; else None."""
    divisor = _terms(b)
    if len(divisor) != 1:
        return 1 if a == b else None
    names, factor = divisor[0]
    out: list[tuple[_Monomial, int]] = []
    for term_names, term_factor in _terms(a):
        rest = list(term_names)
        for name in names:
            if name not in rest:
                return None
            rest.remove(name)
        if term_factor % factor:
            return None
        out.append((tuple(rest), term_factor // factor))
    return _sum(out, _known(a, b, lambda x, y: x // y if y else 0))


def floor_divide(a: Size, b: int) -> Size | None:
    """The quotient `a // b`, rounded down, if b divides all terms of `a` except the constant; else
    None."""
    number = dict(_terms(a)).get((), 0)
    whole = divide(a - number, b)
    return None if whole is None else whole + number // b


def substitute(size: Size, dims: Mapping[str, Size]) -> Size:
    """Replaces the symbols of a size; those that `dims` lacks stay."""
    if not isinstance(size, Dim):
        return size
    total: Size = 0
    for names, factor in size.terms:
        total = total + factor * product(dims.get(n, symbol(n)) for n in names)
    return total


@dataclass(frozen=True)
class Type:
    """Element type and shape of a value; prints as `f32[B,T,768]`."""

    dtype: DType
    shape: Shape

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(str(d) for d in self.shape)}]"

    __repr__ = __str__

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_floating(self) -> bool:
        return self.dtype in FLOATING

    @property
    def is_low(self) -> bool:
        return self.dtype in LOW

    @property
    def is_static(self) -> bool:
        return all(isinstance(d, int) for d in self.shape)

    def with_shape(self, shape: Iterable[Size]) -> Type:
        return Type(self.dtype, tuple(shape))

    def with_dtype(self, dtype: DType) -> Type:
        return Type(dtype, self.shape)

    @property
    def accumulated(self) -> Type:
        """The type in which a computation of this type accumulates: f32 for bf16 and fp16, else the
        same."""
        return self.with_dtype(DType.FLOAT) if self.is_low else self

    def specialized(self, dims: Mapping[str, Size]) -> Type:
        """The type with its symbols replaced by these sizes."""
        return self.with_shape(substitute(d, dims) for d in self.shape)

    @property
    def concrete(self) -> Type:
        """The type with numbers for all dims. Raises ValueError where one is not settled."""
        try:
            return self if self.is_static else self.with_shape(value(d) for d in self.shape)
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from error

    @property
    def numel(self) -> int:
        """The number of elements. Raises ValueError where a dim is not settled."""
        return math.prod(self.concrete.shape)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        return int(self.numel * self.dtype.itemsize)


def dtype_name(dtype: DType) -> str:
    return _SHORT.get(dtype, dtype.name.lower())


def parse_dtype(short: str) -> DType:
    """Parses the short name of a dtype (`"f32"`). Raises KeyError with the valid names."""
    if short not in _LONG:
        raise KeyError(f"unknown dtype {short!r}; one of {', '.join(_LONG)}")
    return _LONG[short]


def parse_type(text: str) -> Type:
    """Parses a type such as `f32[B,T,8]`; dims are integers or plain symbols."""
    head, _, rest = text.strip().partition("[")
    names = [p.strip() for p in rest.rstrip("]").split(",") if p.strip()]
    return Type(parse_dtype(head), tuple(int(p) if p.isdigit() else symbol(p) for p in names))


def rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Casts an array to that dtype; numbers too large for it become infinite, as in a cast of a
    tensor."""
    with np.errstate(over="ignore"):
        return array.astype(dtype.numpy())


def of_array(array: np.ndarray) -> Type:
    return Type(DType.from_numpy(array.dtype), tuple(int(d) for d in array.shape))


def broadcast(*shapes: Shape) -> Shape:
    """The shape of an elementwise result (numpy's rule). Raises ValueError where shapes do not
    broadcast.

    Two different symbols do not broadcast: they are never assumed to be equal.
    """
    rank = max((len(s) for s in shapes), default=0)
    out: list[Size] = []
    for i in range(rank):
        sizes = [s[i - rank + len(s)] for s in shapes if i - rank + len(s) >= 0]
        wide = [d for d in sizes if d != 1]
        if any(d != wide[0] for d in wide):
            shown = " and ".join(f"[{','.join(map(str, s))}]" for s in shapes)
            raise ValueError(f"shapes {shown} do not broadcast")
        out.append(wide[0] if wide else 1)
    return tuple(out)
