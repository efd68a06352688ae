"""Conditions on a batch's sizes that matter to an exported file: `T <= 64`.

torch.export says many that hold for all sizes (`B*T % B == 0`), or for all but those that broadcast
(`T-1 != 1`), which ONNX broadcasts by itself. What is left decides which way the forward goes, or
says where a table or a cut ends. Sizes are tried, since no solver is at hand: all small ones, and
those that the numbers of a condition make.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from types import CodeType

from onward.errors import OnwardError
from onward.graph.graph import Graph, type_of
from onward.graph.types import Dim

_ALLOWED = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add,
    ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE,
    ast.Gt, ast.GtE, ast.Name, ast.Load, ast.Constant, ast.Call,
)  # fmt: skip
_CALLED = {"min": min, "max": max}
_SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 32, 33, 64, 65, 128, 500, 1024, 4097, 65536, 10**6)
_EACH = 4200  # sizes from 2 on that are all tried, at most
_TRIED = 2000
_PAIRED = 24  # sizes of which all pairs are tried


def limits(
    conditions: Iterable[str], graphs: Iterable[Graph] = (), strict: bool = True
) -> list[str]:
    """Returns the conditions that some sizes from 2 on do not fulfil, each once. graphs: those of
    the capture; where a size of theirs is what a condition holds to be no 1, it only broadcasts.
    strict: whether to raise OnwardError for a condition that is more than arithmetic on sizes;
    otherwise it is returned as it is."""
    dims = [dim for graph in graphs for dim in _dims(graph)]
    found: dict[str, None] = {}
    for text in dict.fromkeys(conditions):
        condition = _Condition(ast.parse(text, mode="eval"))
        if not condition.is_arithmetic:
            if strict:
                raise OnwardError(
                    "the model cannot be exported, since a file cannot check the condition "
                    f"{text} on a batch; fix: sizes that do not decide which way the forward goes"
                )
            found[text] = None
        elif not condition.is_of_all_sizes and not condition.only_broadcasts(dims):
            found[ast.unparse(condition.tree)] = None
    return list(found)


def beside_tables(conditions: Iterable[str], graph: Graph) -> list[str]:
    """The conditions without those that say where a table of the graph ends: `T <= 64`, where it
    reads the first T rows of 64. An engine fails beyond."""
    ends = _ends_of_tables(graph)
    made = {text: _Condition(ast.parse(text, mode="eval")) for text in conditions}
    return [text for text, c in made.items() if not c.is_arithmetic or c.bound not in ends]


@dataclass(frozen=True)
class _Condition:
    """A condition on sizes, as Python's syntax tree of it."""

    tree: ast.Expression

    @cached_property
    def code(self) -> CodeType:
        return compile(self.tree, "<sizes>", "eval")

    @property
    def is_arithmetic(self) -> bool:
        nodes = list(ast.walk(self.tree))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        plain = all(isinstance(c.func, ast.Name) and c.func.id in _CALLED for c in calls)
        return plain and all(isinstance(node, _ALLOWED) for node in nodes)

    @cached_property
    def names(self) -> list[str]:
        found = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        return sorted(found - _CALLED.keys())

    @property
    def is_of_all_sizes(self) -> bool:
        return all(_holds(self.code, sizes) for sizes in self.samples())

    @property
    def bound(self) -> int | None:
        """The largest size that fulfils a condition on one size, if all up to it do; else None."""
        if len(self.names) != 1:
            return None
        tried = {sizes[self.names[0]]: _holds(self.code, sizes) for sizes in self.samples()}
        largest = max((size for size, holds in tried.items() if holds), default=0)
        whole = all(holds == (size <= largest) for size, holds in tried.items())
        return largest if whole and largest + 1 in tried else None

    def only_broadcasts(self, dims: Iterable[Dim]) -> bool:
        """Whether the condition is that one of the graph's sizes, which is no size of the batch, is
        not 0 or 1, as torch.export says of whatever may be broadcast: `T-1 != 1`."""
        size = _no_one(self.tree.body)
        if size is None or isinstance(size, ast.Name):
            return False
        code = compile(ast.Expression(size), "<size>", "eval")
        names = {node.id for node in ast.walk(size) if isinstance(node, ast.Name)}
        samples = list(self.samples())
        return any(
            dim.symbols <= names
            and all(_number(code, sizes) == dim.number(sizes) for sizes in samples)
            for dim in dims
        )

    def samples(self) -> Iterable[Mapping[str, int]]:
        """Sizes by name at which a condition is tried."""
        nodes = ast.walk(self.tree)
        given = [node.value for node in nodes if isinstance(node, ast.Constant)]
        numbers = sorted({n for n in given if isinstance(n, int) and 0 <= n <= 10**9})
        near = {n + step for n in numbers for step in (-1, 0, 1)}
        made = {a + b for a in near for b in near} | {a // b for a in near for b in near if b > 0}
        sizes = sorted({*_SIZES, *near, *made} - {0, 1})
        sizes = [size for size in sizes if size > 1]
        if len(self.names) == 1:
            every = range(2, min(2 * max(numbers, default=0) + 4, _EACH))
            yield from ({self.names[0]: size} for size in sorted({*sizes, *every}))
            return
        yield from (dict.fromkeys(self.names, size) for size in sizes)
        if len(self.names) == 2:
            few = sorted({*_SIZES[:9], *(n for n in near if n > 1)})[:_PAIRED]
            yield from (dict(zip(self.names, pair, strict=True)) for pair in product(few, few))
        draw = random.Random(0)
        for _ in range(_TRIED if len(self.names) > 1 else 0):
            yield {name: draw.choice(sizes) for name in self.names}


def _holds(code: CodeType, sizes: Mapping[str, int]) -> bool:
    return bool(_number(code, sizes))


def _number(code: CodeType, sizes: Mapping[str, int]) -> int:
    """The value of an expression; 0 where it divides by 0."""
    try:
        return int(eval(code, {"__builtins__": {}, **_CALLED}, dict(sizes)))
    except ZeroDivisionError:
        return 0


def _no_one(test: ast.expr) -> ast.expr | None:
    """The size of which a condition says that it is neither 0 nor 1; None for other conditions."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    right = test.comparators[0]
    number = right.value if isinstance(right, ast.Constant) else None
    op = test.ops[0]
    is_said = (isinstance(op, ast.NotEq) and number == 1) or (
        isinstance(op, ast.GtE) and number == 2
    )
    return test.left if is_said else None


def _dims(graph: Graph) -> set[Dim]:
    """The sizes of a graph's values that are more than a symbol."""
    values = [*graph.inputs, *(y for node in graph for y in node.outputs)]
    dims = {size for v in values for size in type_of(v).shape if isinstance(size, Dim)}
    return {dim for dim in dims if str(dim) not in dim.symbols}


def _ends_of_tables(graph: Graph) -> set[int]:
    """The sizes of dims of which the graph reads as many rows as a batch needs."""
    found: set[int] = set()
    for node in graph:
        table = node.inputs[0] if node.inputs else None
        if table is None or node.op_type != "Slice":
            continue
        after = type_of(node.outputs[0]).shape
        pairs = zip(type_of(table).shape, after, strict=True)
        read = [size for size, left in pairs if isinstance(left, Dim)]
        found.update(size for size in read if isinstance(size, int))
    return found


__all__ = ["beside_tables", "limits"]
