"""Reads a loop's source: whether a turn without rows changes nothing.

Eager PyTorch skips the turns of experts that no token is sent to; a graph has one form for every
batch, and takes each turn. So each statement of the loop has to be one that changes nothing where
it meets no rows. Functions that the loop calls are not read; a forward that sets something
elsewhere is found by other means.
"""

from __future__ import annotations

import ast
import dis
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

_ADDING = "index_add_"


def asking_frame() -> FrameType | None:
    """The forward's own frame."""
    frame: FrameType | None = sys._getframe(1)
    own = ("onward.capture", "onward.model_state", "torch")
    while frame is not None and frame.f_globals.get("__name__", "").startswith(own):
        frame = frame.f_back
    return frame


def skips_nothing(frame: FrameType | None) -> bool:
    """Whether a frame that asks in an `if` whether there are rows may be told that there are, in
    every turn of the loop that it is in: it asks of the rows that the turn has chosen, and does
    nothing without them on either side."""
    if frame is None:
        return False
    tree, first = _read(frame.f_code)
    line = frame.f_lineno - first + 1
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and n.lineno <= line <= _end(n)]
    loop = max(loops, key=lambda n: n.lineno, default=None)
    if loop is None or not _changes_nothing(frame.f_code, loop.lineno):
        return False
    chosen, choices = _chosen(loop)
    asked = [s.test for s in _statements(loop.body) if isinstance(s, ast.If)]
    asked = [t for t in asked if t.lineno <= line <= _end(t)]
    names = {n.id for t in asked for n in ast.walk(t) if isinstance(n, ast.Name)}
    return len(asked) == 1 and choices == 1 and names <= chosen


def begins(frame: FrameType) -> bool:
    """Whether a frame, which asks for an iterator, begins such a loop: the iterator's own turns are
    the loop's, and nobody counts them."""
    return (
        frame.f_code.co_code[frame.f_lasti] == dis.opmap["GET_ITER"] and _begun(frame) is not None
    )


def over_all(frame: FrameType) -> bool:
    """Whether a frame, which calls `range` or `enumerate`, begins such a loop with what it gets,
    one that chooses rows once a turn, and whose number is nothing but an index: the number may
    then stand for those of all experts."""
    loop = _begun(frame)
    if loop is None or _chosen(loop)[1] != 1:
        return False
    number, *_ = _names(loop.target)
    nodes, indices = [*ast.walk(loop)], set[ast.AST]()
    for n in nodes:
        if isinstance(n, ast.Subscript):
            indices.update(n.slice.elts if isinstance(n.slice, ast.Tuple) else [n.slice])
    named = {n for n in nodes if isinstance(n, ast.Name) and n.id == number}
    return named - {*ast.walk(loop.target)} <= indices


def _begun(frame: FrameType) -> ast.For | None:
    """The loop whose iterator a frame is about to have, where turns without rows change nothing."""
    code = frame.f_code
    place = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
    tree, first = _read(code)
    for n in ast.walk(tree):
        # the place of the iterator, or in older Pythons that of the loop
        if isinstance(n, ast.For) and _width(*place) in (_place(n.iter, first), _place(n, first)):
            return n if _changes_nothing(code, n.lineno) else None
    return None


def lists_of_pieces(
    frame: FrameType | None, said: bool
) -> tuple[tuple[str, ...], tuple[int, int]] | None:
    """The lists to which a loop over pieces of rows appends, and the loop's first and last line.

    frame: asks in an `if` of the loop whether a piece has rows. said: what the `if` is told where
    there are rows. None where a turn without rows may do more than leave out its piece.
    """
    if frame is None:
        return None
    tree, first = _read(frame.f_code)
    line = frame.f_lineno - first + 1
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and n.lineno <= line <= _end(n)]
    loop = max(loops, key=lambda n: n.lineno, default=None)
    asked = [] if loop is None else [s for s in loop.body if isinstance(s, ast.If)]
    asked = [s for s in asked if s.test.lineno <= line <= _end(s.test)]
    if loop is None or len(asked) != 1:
        return None
    without = asked[0].orelse if said else asked[0].body
    if not all(isinstance(s, (ast.Continue, ast.Pass)) for s in without):
        return None
    lists = _lists(tree, loop)
    shift = first - 1
    return None if lists is None else (lists, (loop.lineno + shift, _end(loop) + shift))


def _lists(tree: ast.Module, loop: ast.For) -> tuple[str, ...] | None:
    statements, lists = [*_statements(loop.body)], set[str]()
    for s in statements:
        match s:
            case ast.Assign():
                if not all(map(_names, s.targets)):
                    return None
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name),
                                                            attr="append"))):  # fmt: skip
                lists.add(name)
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.If() | ast.With() | ast.Continue() | ast.Pass() | ast.Assert():
                pass
            case _:
                return None
    changed = any(_hidden_change(n) or _called(n) == _ADDING for s in loop.body
                  for n in ast.walk(s))  # fmt: skip
    if loop.orelse or changed:
        return None
    if any(isinstance(n, (ast.Global, ast.Nonlocal)) for n in ast.walk(tree)):
        return None
    own = {*_names(loop.target)}
    stored = own | _stored(statements)
    if stored & lists or not all(_only_cat(tree, name) for name in lists):
        return None
    sums = {n for n in stored - own if _reads_first(loop.body, {n})}
    if not _only_bounds(statements, loop, sums) or _read_later(tree, loop, stored):
        return None
    return tuple(sorted(lists))


def _stored(statements: Iterable[ast.stmt]) -> set[str]:
    """The names that statements assign to."""
    assigned = [s for s in statements if isinstance(s, ast.Assign)]
    return {name for s in assigned for target in s.targets for name in _names(target)}


def _only_bounds(statements: Sequence[ast.stmt], loop: ast.For, sums: set[str]) -> bool:
    """Whether names that a turn hands to the next are sums, which bound slices and no more."""
    allowed, before = set[int](), -1
    while len(sums) != before:
        before = len(sums)
        for s in statements:
            parts = _parts(s.value) if isinstance(s, ast.Assign) else []
            if any(isinstance(p, ast.Name) and p.id in sums for p in parts):
                allowed |= {id(p) for p in parts}
                sums |= _stored([s])
    for n in ast.walk(loop):
        if isinstance(n, ast.Slice):
            allowed |= {id(p) for bound in (n.lower, n.upper) for p in _parts(bound)}
    return all(
        id(n) in allowed for n in ast.walk(loop)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in sums
    )  # fmt: skip


def _parts(value: ast.expr | None) -> list[ast.expr | None]:
    """Both sides of `a + b`, or the expression by itself."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return [value.left, value.right]
    return [value]


def _only_cat(tree: ast.Module, name: str) -> bool:
    """Whether a list begins empty, and is read by `cat` alone, and where it is asked whether it has
    anything."""
    stores = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name
              and not isinstance(n.ctx, ast.Load)]  # fmt: skip
    empty = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and _names(n.targets[0])
             == [name] and isinstance(n.value, ast.List) and not n.value.elts]  # fmt: skip
    if len(stores) != 1 or len(empty) != 1:
        return False
    allowed = set[int]()
    for n in ast.walk(tree):
        if isinstance(n, ast.Call) and _called(n) in ("cat", "concat", "concatenate"):
            allowed |= {id(a) for a in (*n.args[:1], *(k.value for k in n.keywords))}
        elif isinstance(n, (ast.If, ast.IfExp)):
            allowed.add(id(n.test))
        elif _called(n) == "append" and isinstance(n, ast.Call):
            allowed |= {id(v) for v in ast.walk(n.func)}
    loads = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name
             and isinstance(n.ctx, ast.Load)]  # fmt: skip
    return all(id(n) in allowed for n in loads)


def _place(node: ast.expr | ast.stmt, first: int) -> Any:
    shift = first - 1
    return _width(node.lineno + shift, _end(node) + shift, node.col_offset, node.end_col_offset)


def _width(line: Any, end: Any, column: Any, end_column: Any) -> Any:
    """The lines of a place in code, and its width: indentation moves both columns alike."""
    return line, end, None if None in (column, end_column) else end_column - column


@lru_cache(maxsize=256)
def _read(code: CodeType) -> tuple[ast.Module, int]:
    """A function's code, and its first line; nothing where its source is not at hand."""
    try:
        lines, first = inspect.getsourcelines(code)
        return ast.parse(textwrap.dedent("".join(lines))), max(first, 1)
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], []), 1


def _end(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


@lru_cache(maxsize=256)
def _changes_nothing(code: CodeType, line: int) -> bool:
    """Whether the loop of this line, of the source that is read, does not where it has no rows."""
    tree = _read(code)[0]
    loop = next(n for n in ast.walk(tree) if isinstance(n, ast.For) and n.lineno == line)
    if loop.orelse:
        return False
    chosen, _ = _chosen(loop)
    numbers = {*_names(loop.target)}
    if not all(_harmless(s, chosen, numbers) for s in _statements(loop.body)):
        return False
    if any(_hidden_change(n) for s in loop.body for n in ast.walk(s)):
        return False
    if any(isinstance(n, (ast.Global, ast.Nonlocal)) for n in ast.walk(tree)):
        return False
    own = {*_names(loop.target)}
    stored = own | _stored(_statements(loop.body))
    return not _reads_first(loop.body, stored - own) and not _read_later(tree, loop, stored)


def _harmless(s: ast.stmt, chosen: set[str], numbers: set[str]) -> bool:
    match s:
        case ast.Assign():
            return all(_names(t) or _of_mask(t, numbers) for t in s.targets)
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=call):
            return _called(call) == _ADDING and _added_at(call, chosen)
        case _:
            return isinstance(s, (ast.If, ast.With, ast.Continue, ast.Pass, ast.Assert))


def _chosen(loop: ast.For) -> tuple[set[str], int]:
    """The names of rows that a turn chooses, and nothing else has; and how often it chooses."""
    made, others, choices = set[str](), set[str](), 0
    for s in _statements(loop.body):
        if isinstance(s, ast.Assign):
            choice = _is_choice(s.value)
            choices += choice
            for target in s.targets:
                (made if choice else others).update(_names(target))
    return made - others, choices


def _is_choice(node: ast.expr) -> bool:
    """`where(mask)`, `mask.nonzero(...)`."""
    if not isinstance(node, ast.Call):
        return False
    name, given = _called(node), len(node.args) + len(node.keywords)
    return (name == "where" and given == 1) or name == "nonzero"


def _added_at(call: ast.expr, chosen: set[str]) -> bool:
    """`y.index_add_(0, rows, ...)`, of rows that the loop chooses."""
    if not isinstance(call, ast.Call):
        return False
    index = next((k.value for k in call.keywords if k.arg == "index"), None)
    index = call.args[1] if index is None and len(call.args) > 1 else index
    return isinstance(index, ast.Name) and index.id in chosen


def _of_mask(target: ast.expr, numbers: set[str]) -> bool:
    """`x[mask[:, e]]`, of rows that a mask chooses by the loop's number."""
    match target:
        case ast.Subscript(value=ast.Name(), slice=ast.Subscript(value=ast.Name(), slice=index)):
            return _reads(index, numbers)
        case _:
            return False


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, and of its `if`s and `with`s."""
    for s in body:
        yield s
        if isinstance(s, (ast.If, ast.With)):
            yield from _statements(s.body)
        if isinstance(s, ast.If):
            yield from _statements(s.orelse)


def _names(target: ast.expr) -> list[str]:
    """The names of a target that is made of names alone; none of any other."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, (ast.Tuple, ast.List)):
        found = [_names(t) for t in target.elts]
        return [n for names in found for n in names] if all(found) else []
    return []


def _called(node: ast.AST) -> str:
    """The name of the function that an expression calls."""
    if not isinstance(node, ast.Call):
        return ""
    f = node.func
    return f.attr if isinstance(f, ast.Attribute) else f.id if isinstance(f, ast.Name) else ""


def _hidden_change(node: ast.AST) -> bool:
    """An assignment within an expression, or a call in place other than those that add rows."""
    name = _called(node)
    in_place = name.endswith("_") and not name.endswith("__") and name != _ADDING
    return in_place or isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))


def _reads(node: ast.AST, names: set[str]) -> bool:
    return any(
        isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names
        for n in ast.walk(node)
    )


def _reads_first(body: Sequence[ast.stmt], names: set[str]) -> bool:
    """Whether a block may read one of these names before it stores it; takes out of `names` those
    that it stores for certain."""
    for s in body:
        if isinstance(s, ast.If):
            sides = [{*names}, {*names}]
            inner = zip((s.body, s.orelse), sides, strict=True)
            if _reads(s.test, names) or any(_reads_first(b, side) for b, side in inner):
                return True
            names &= sides[0] | sides[1]  # what a side does not store
        elif isinstance(s, ast.With):
            if any(_reads(i, names) for i in s.items) or _reads_first(s.body, names):
                return True
        elif isinstance(s, (ast.Continue, ast.Return, ast.Raise)):
            if _reads(s, names):
                return True
            names.clear()  # nobody gets behind it
        elif _reads(s, names):
            return True
        elif isinstance(s, ast.Assign):
            names.difference_update(n for t in s.targets for n in _names(t))
    return False


def _read_later(tree: ast.Module, loop: ast.For, stored: set[str]) -> bool:
    """Whether what a turn stores may be read after the loop, by another turn of one around it, or
    by a function within."""
    names = {*stored}
    path = _path(tree.body[0], loop) if tree.body else None
    if path is None:
        return True
    inside = {id(n) for n in ast.walk(loop)}
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for n in ast.walk(tree.body[0]):
        within = isinstance(n, functions) and n is not tree.body[0] and id(n) not in inside
        if within and _reads(n, names):
            return True
    for outer, inner in zip(path[-2::-1], path[:0:-1], strict=True):
        if isinstance(outer, (ast.For, ast.While, ast.Try)):
            loads = {id(n) for n in ast.walk(outer) if isinstance(n, ast.Name)
                     and isinstance(n.ctx, ast.Load) and n.id in stored}  # fmt: skip
            if loads - inside:
                return True
        block = next((b for b in _blocks(outer) if any(s is inner for s in b)), [])
        at = next((i for i, s in enumerate(block) if s is inner), len(block))
        if _reads_first(block[at + 1 :], names):
            return True
    return False


def _path(node: ast.stmt, loop: ast.For) -> list[ast.stmt] | None:
    """The statements around a loop, outermost first, and itself."""
    if node is loop:
        return [node]
    for block in _blocks(node):
        for s in block:
            found = _path(s, loop)
            if found is not None:
                return [node, *found]
    return None


def _blocks(node: ast.stmt) -> list[list[ast.stmt]]:
    fields = ("body", "orelse", "finalbody")
    found = [getattr(node, f) for f in fields if isinstance(getattr(node, f, None), list)]
    return found + [h.body for h in getattr(node, "handlers", [])]
