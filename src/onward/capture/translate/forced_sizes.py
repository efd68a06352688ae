"""Finds symbolic sizes that the guards of a trace force to a number.

For a `[B, 2]` tensor viewed as another input's `[B, T]`, torch.export keeps the guard `2*B == B*T`
with two symbols. Its only solution is T = 2, and shapes can only be compared if T is that number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy


def forced(equations: Iterable[Any], first: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """Returns the sizes that have to be numbers, with their numbers in the first batch.

    equations: the guards. first: symbol -> size in the first batch. Each equation says that a
    product of factors is 0, where sizes are above 0. A factor with one symbol has one solution. A
    factor with several keeps them if it is the only factor and gives one symbol as a polynomial in
    the others (`B*T - N`): torch.export has already substituted that symbol. Any other factor
    (`B*T - C*D`, or B - D in `B*T - D*T`) says more than shapes can express, and its symbols become
    numbers.
    """
    found: dict[sympy.Symbol, int] = {}
    for equation in equations:
        if not isinstance(equation, sympy.Eq):
            continue  # true or false as it stands
        left, right = equation.args
        difference = sympy.expand(left - right)  # type: ignore[operator]
        if not difference.is_polynomial(*difference.free_symbols):
            continue  # floor divisions, remainders, minima
        factors = [factor for factor, _ in sympy.factor_list(difference)[1]]
        for factor in factors:
            sizes = factor.free_symbols
            known = len(factors) == 1 and _solved(factor)  # torch.export has substituted it
            if sizes <= first.keys() and factor.subs(first) == 0 and not known:
                found |= {size: first[size] for size in sizes}
    return found


def _solved(factor: Any) -> bool:
    """Returns whether factor = 0 gives one of several symbols as a polynomial in the others."""
    sizes = factor.free_symbols
    return len(sizes) > 1 and any(
        sympy.degree(factor, size) == 1 and abs(sympy.LC(factor, size)) == 1 for size in sizes
    )


__all__ = ["forced"]
