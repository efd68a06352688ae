"""Checks that a text is a condition on a batch's sizes, as an export writes them, and nothing else.

Conditions in a file are compiled and run. So they have to match a grammar with comparisons, `and`,
`or`, `not`, integer arithmetic, integers, and sizes such as `L['leaves'][0].size()[1]`.
"""

from __future__ import annotations

import ast

_LONGEST = 2000
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARED = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_MOST = 1 << 53


def is_condition(text: str) -> bool:
    """Returns whether a text is a condition on sizes and nothing more."""
    if len(text) > _LONGEST:
        return False
    try:
        found = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return _condition(found)


def _condition(x: ast.expr) -> bool:
    match x:
        case ast.BoolOp():
            return all(map(_condition, x.values))
        case ast.UnaryOp(op=ast.Not()):
            return _condition(x.operand)
        case ast.Compare():
            known = all(isinstance(op, _COMPARED) for op in x.ops)
            return known and all(map(_number, [x.left, *x.comparators]))
    return False


def _number(x: ast.expr) -> bool:
    match x:
        case ast.Constant():
            return type(x.value) is int and abs(x.value) <= _MOST
        case ast.UnaryOp(op=ast.USub()):
            return _number(x.operand)
        case ast.BinOp():
            return isinstance(x.op, _BINARY) and _number(x.left) and _number(x.right)
        case ast.Subscript(value=ast.Call(func=func, args=[], keywords=[])):  # one of the sizes
            return _index(x.slice) and _is_size_of_leaf(func)
    return False


def _is_size_of_leaf(x: ast.expr) -> bool:
    match x:
        case ast.Attribute(
            attr="size",
            value=ast.Subscript(
                slice=leaf,
                value=ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value="leaves")),
            ),
        ):
            return _index(leaf)
    return False


def _index(x: ast.expr) -> bool:
    return isinstance(x, ast.Constant) and type(x.value) is int and 0 <= x.value < 1 << 16


__all__ = ["is_condition"]
