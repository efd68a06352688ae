"""Held sizes: sizes of the batch that a capture fixes to a number, or to multiples of one.

A graph's sizes are polynomials in the batch's sizes. Where a model has `T // 8` patches or windows,
`T` is captured as `8 * q`, so that `T // 8` is `q`; a batch whose `T` is no multiple of 8 gets a
capture of its own, with `T` as a number. A size that is neither a polynomial nor a quotient also
makes the batch's size a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch

from onward.errors import CaptureError
from onward.model_state.one_line import READ, shortened

_UNKNOWN = re.compile(r"z?u[fi]?\d+$")  # an export's names for unbacked (data-dependent) symbols
# (leaf, dim) of a batch -> (factor, group): the size is a number where the factor is 0, else the
# factor times a symbol that all sizes of the group share
Held: TypeAlias = Mapping[tuple[int, int], tuple[int, int]]


class SizeError(CaptureError):
    """A size of the model that is no polynomial in the batch's sizes, or has to be a number.

    expr: the size as a sympy expression. as_number: whether the batch's sizes in it are to be held
    as numbers, not as multiples."""

    def __init__(self, expr: Any, as_number: bool = False) -> None:
        self.expr, self.as_number = expr, as_number
        if any(_UNKNOWN.match(str(s)) for s in getattr(expr, "free_symbols", ())):
            super().__init__(f"the forward: {READ}")
            return
        super().__init__(
            shortened(f"a size of the model is {expr}, which is not a polynomial of the batch's")
        )


def alike(node: Any) -> Any:
    """Returns the sum of the symbolic sizes of a node's inputs that are equal in the first batch
    without being known to be equal: an op whose inputs do not fit together may need them to be.
    None where there are none."""
    by_number: dict[Any, set[Any]] = {}
    for given in node.all_input_nodes:
        for size in getattr(given.meta.get("val"), "shape", ()):
            fixed = isinstance(size, int)
            by_number.setdefault(size if fixed else size.node.hint, set()).add(
                size if fixed else size.node.expr
            )
    several = [exprs for exprs in by_number.values() if len(exprs) > 1]
    found = {e for exprs in several for e in exprs if not isinstance(e, int)}
    return sympy.Add(*found) if found else None


def hold(
    error: SizeError, leaves: Sequence[Any], tensors: Sequence[torch.Tensor], held: Held
) -> Held | None:
    """Returns the sizes to hold in the next export, `held` among them, so that the size of `error`
    is a polynomial; None where no size of the batch occurs in it. leaves: the export's placeholders
    of `tensors`."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    group = 1 + max((g for _, g in held.values()), default=0)
    for unknown in sorted(error.expr.free_symbols, key=str):
        places = [
            (leaf, dim)
            for leaf, node in enumerate(leaves)
            for dim, size in enumerate(node.meta["val"].shape)
            if not isinstance(size, int) and unknown in _symbols(size.node)
        ]
        if not places:
            continue
        leaf, dim = places[0]
        size, by = tensors[leaf].shape[dim], divisor(error.expr, unknown)
        before, _ = held.get(places[0], (1, 0))
        factor = before * by
        if error.as_number or by < 2 or size % factor or size < 2 * factor:
            factor = 0
        found |= dict.fromkeys(places, (factor, group))
        group += 1
    return {**held, **found} if found else None


def _symbols(node: Any) -> set[Any]:
    """Returns the symbols of a size, also those that the trace has replaced since."""
    return node.expr.free_symbols | getattr(node, "_expr", node.expr).free_symbols


def all_numbers(held: Held) -> Held | None:
    """Returns the held sizes, all as numbers; None where none is held as a multiple."""
    if not any(factor for factor, _ in held.values()):
        return None
    return {place: (0, group) for place, (_, group) in held.items()}


def divisor(expr: Any, unknown: Any) -> int:
    """Returns the least common multiple of the divisors in `expr` (of `//` and `%`) of terms that
    contain the symbol `unknown`; 1 where there are none."""
    by = 1
    for part in sympy.preorder_traversal(expr):
        if type(part).__name__ in ("FloorDiv", "CleanDiv", "Mod", "PythonMod", "ModularIndexing"):
            numbers = [a for a in part.args[1:] if isinstance(a, sympy.Integer)]
            if unknown in part.free_symbols:
                for number in numbers:
                    by = math.lcm(by, abs(int(number)))
    return by


def of_images(t: torch.Tensor) -> bool:
    """Returns whether a tensor holds RGB images or videos, `f[*,3,H,W]`. Their sizes are numbers
    from the start: windows, strides and pooling divide them again and again, and an export that
    carries all these quotients takes minutes."""
    return t.is_floating_point() and t.dim() in (4, 5) and t.shape[-3] == 3


def dynamic_shapes(tensors: Sequence[torch.Tensor], held: Held) -> tuple[Any, ...]:
    """Returns `dynamic_shapes` for `torch.export`: for each tensor dim -> `Dim`, for sizes above 1;
    images' sizes and those held as numbers are static."""
    common: dict[int, Any] = {}

    def dim(leaf: int, d: int) -> Any:
        factor, group = held.get((leaf, d), (1, 0))
        if (leaf, d) not in held:
            within = of_images(tensors[leaf]) and d >= tensors[leaf].dim() - 3
            return torch.export.Dim.STATIC if within else torch.export.Dim.AUTO
        if not factor:
            return torch.export.Dim.STATIC
        if group not in common:
            common[group] = torch.export.Dim(f"held{group}", min=2)
        return factor * common[group]

    return tuple(
        {d: dim(i, d) for d, n in enumerate(t.shape) if n > 1} or None
        for i, t in enumerate(tensors)
    )


__all__ = ["Held", "SizeError", "alike", "all_numbers", "divisor", "dynamic_shapes", "hold"]
