"""Sizes that a trace fixes without saying so.

torch.export keeps `2*B == B*T` (a `[B, 2]` result that is viewed as another input's `[B, T]`) as
a guard on two open sizes. There is one answer, T = 2, and shapes that know it can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy


def forced(equations: Iterable[Any], first: Mapping[sympy.Symbol, int]) -> dict[sympy.Symbol, int]:
    """The sizes of `first` (name -> size in the first batch) to which `equations` leave no choice.

    An equation is a product of factors that is 0, and sizes are above 0. Only a factor of one size
    decides; one of two (`B*T - N`) is a relation that batches of many sizes may fulfil.
    """
    found: dict[sympy.Symbol, int] = {}
    for equation in equations:
        if not isinstance(equation, sympy.Eq):
            continue  # true or false as it stands
        left, right = equation.args
        difference = sympy.expand(left - right)  # type: ignore[operator]
        if difference.atoms(sympy.Function):
            continue  # divisions with a remainder
        for factor, _ in sympy.factor_list(difference)[1]:
            (size, *others) = factor.free_symbols
            if not others and size in first and factor.subs(size, first[size]) == 0:
                found[size] = first[size]
    return found


__all__ = ["forced"]
