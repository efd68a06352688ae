"""Conditions on a batch's sizes that matter to an exported file: `T <= 64`.

torch.export says many that hold for all sizes (`B*T % B == 0`), or for all but those that broadcast
(`T-1 != 1`), which ONNX broadcasts by itself. What is left decides which way the forward goes, or
what is cut from a batch (`T-3 >= 0`).
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Mapping

from onward.errors import OnwardError

_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add,
    ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE,
    ast.Gt, ast.GtE, ast.Name, ast.Load, ast.Constant,
)  # fmt: skip
_SIZES = (4, 5, 6, 7, 8, 9, 12, 16, 31, 32, 33, 64, 65, 128, 500, 1024, 4097, 65536, 10**6)
_SMALL = (2, 3)  # sizes that an end of a cut is compared with too
_TRIED = 2000


def limits(conditions: Iterable[str]) -> list[str]:
    """Returns the conditions that some sizes from 4 on do not fulfil, each once; of those that a
    size is at least 0, also what some from 2 on do not. Raises OnwardError for one that is more
    than arithmetic on sizes."""
    found: dict[str, None] = {}
    for text in conditions:
        tree = ast.parse(text, mode="eval")
        if not all(isinstance(node, _ALLOWED) for node in ast.walk(tree)):
            raise OnwardError(
                f"the model cannot be exported, since a file cannot check the condition {text} on "
                "a batch; fix: sizes that do not decide which way the forward goes"
            )
        code = compile(tree, "<sizes>", "eval")
        names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
        small = [dict.fromkeys(names, size) for size in _SMALL if _is_of_a_cut(tree.body)]
        if not all(eval(code, {}, sizes) for sizes in (*small, *_samples(names))):
            found[ast.unparse(tree)] = None
    return list(found)


def _is_of_a_cut(x: ast.expr) -> bool:
    """Whether a condition is that a size is at least 0."""
    match x:
        case ast.Compare(ops=[ast.GtE()], comparators=[ast.Constant(value=0)]):
            return True
    return False


def _samples(names: list[str]) -> Iterable[Mapping[str, int]]:
    draw = random.Random(0)
    yield from (dict.fromkeys(names, size) for size in _SIZES)
    for _ in range(_TRIED if len(names) > 1 else 0):
        yield {name: draw.choice(_SIZES) for name in names}


__all__ = ["limits"]
