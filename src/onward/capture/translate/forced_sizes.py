"""Sizes that a trace fixes without saying so.

torch.export keeps `2*B == B*T` (a `[B, 2]` result that is viewed as another input's `[B, T]`) as
a guard on two open sizes. There is one answer, T = 2, and shapes that know it can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy


def forced(equations: Iterable[Any], first: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """The sizes of `first` (name -> size in the first batch) that are to be numbers.

    An equation is a product of factors that is 0, and sizes are above 0. A factor of one size has
    one answer. One of several that gives none of them by the others (`B*T - C*D`) says more than
    shapes can express, so that they are fixed as they are; where it does, as the whole of the
    equation (`B*T - N`), they stay open. (Of `B*T - D*T` torch.export does not know that B is D.)
    """
    found: dict[sympy.Symbol, int] = {}
    for equation in equations:
        if not isinstance(equation, sympy.Eq):
            continue  # true or false as it stands
        left, right = equation.args
        difference = sympy.expand(left - right)  # type: ignore[operator]
        if not difference.is_polynomial(*difference.free_symbols):
            continue  # divisions with a remainder, the smaller of two
        factors = [factor for factor, _ in sympy.factor_list(difference)[1]]
        for factor in factors:
            sizes = factor.free_symbols
            known = len(factors) == 1 and _solved(factor)  # torch.export has put it in
            if sizes <= first.keys() and factor.subs(first) == 0 and not known:
                found |= {size: first[size] for size in sizes}
    return found


def _solved(factor: Any) -> bool:
    """Whether a factor that is 0 gives one of several sizes as a polynomial of the others."""
    sizes = factor.free_symbols
    return len(sizes) > 1 and any(
        sympy.degree(factor, size) == 1 and abs(sympy.LC(factor, size)) == 1 for size in sizes
    )


__all__ = ["forced"]
