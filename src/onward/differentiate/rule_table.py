"""The table of gradient rules, one for each op, written with the Builder (`rules/<family>.py`).

A rule takes `(b, dys, ys, xs, attrs)`: the gradients of the outputs (None where no gradient flows),
the outputs, the inputs, the attributes. It returns one gradient or None per input. Most ops have
one output; their rules are written `(b, dy, y, *xs)`. Rules ignore broadcasting, which the walk
undoes. Ops without a gradient are listed explicitly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, TypeAlias

from onward.graph.build import Builder
from onward.graph.graph import Value
from onward.graph.ops import OPS
from onward.graph.registry import enter

Gradients: TypeAlias = Sequence[Value | None]
Rule: TypeAlias = Callable[
    [Builder, list[Value | None], list[Value], list[Value | None], dict[str, Any]], Gradients
]
RULES: dict[str, Rule] = {}

# Ops without a gradient, by reason.
WITHOUT_GRADIENT: dict[str, frozenset[str]] = {
    "its result is an integer, a bool or a step function": frozenset(
        {
            "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not",
            "ArgMax", "Floor", "Ceil", "Round", "Sign", "IsNaN", "IsInf", "BitwiseXor",
            "BitwiseAnd", "BitwiseOr", "BitShift", "BitwiseNot", "OneHot", "NonZero", "Rows",
            "AllFinite", "InRange",
        }
    ),
    "its result is drawn at random": frozenset({"RandomUniform"}),
    "it is a placeholder of a gradient": frozenset({"GradientOf"}),
    "it stops gradients on purpose": frozenset({"StopGradient"}),
    "it depends on shapes alone": frozenset({"Shape", "Range", "ConstantOfShape"}),
}  # fmt: skip
NO_GRADIENT = frozenset(op for ops in WITHOUT_GRADIENT.values() for op in ops)


def register(op_type: str, rule: Rule) -> None:
    """Registers the rule of an op. Raises ValueError for an unknown op, and for one that already
    has a rule or is listed as without a gradient."""
    if op_type not in OPS:
        raise ValueError(f"there is no op {op_type}; fix: register the op before its gradient rule")
    if op_type in NO_GRADIENT:
        raise ValueError(
            f"the op {op_type} has no gradient on purpose; fix: register an op of your own"
        )
    enter(RULES, "gradient rule of", op_type, rule)


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Registers a rule of the full form, for ops with several outputs or with attributes."""

    def decorate(function: Rule) -> Rule:
        for op_type in op_types:
            register(op_type, function)
        return function

    return decorate


def unary(op_type: str, function: Callable[[Builder, Value, Value, Value], Value]) -> None:
    """Registers the rule `dx` of an elementwise op, a function of `(b, dy, y, x)`."""

    def full(
        b: Builder,
        dys: list[Value | None],
        ys: list[Value],
        xs: list[Value | None],
        attrs: dict[str, Any],
    ) -> Gradients:
        assert dys[0] is not None and xs[0] is not None
        return [function(b, dys[0], ys[0], xs[0])]

    register(op_type, update_wrapper(full, function))


def binary(
    op_type: str, function: Callable[[Builder, Value, Value, Value, Value], Gradients]
) -> None:
    """Registers the rule `(da, db)` of an elementwise op, a function of `(b, dy, y, a, b)`."""

    def full(
        b: Builder,
        dys: list[Value | None],
        ys: list[Value],
        xs: list[Value | None],
        attrs: dict[str, Any],
    ) -> Gradients:
        if len(xs) != 2:
            raise ValueError(f"{op_type} with {len(xs)} inputs has no gradient rule")
        assert dys[0] is not None and xs[0] is not None and xs[1] is not None
        return function(b, dys[0], ys[0], xs[0], xs[1])

    register(op_type, update_wrapper(full, function))


def only(dys: list[Value | None]) -> Value:
    """The gradient of the first output; asserts that no other output has one."""
    assert dys[0] is not None and all(dy is None for dy in dys[1:])
    return dys[0]
