"""Records where a forward reads its mode: `self.training`, and whether gradients are on.

A forward that reads its mode only to switch dropout computes the same in evaluation, without the
dropout, so that the evaluation need not be traced (`evaluation.py`). While a trace runs,
`self.training` of every module is a property that records its readers. A read only switches dropout
where the code passes the value straight on, in one of these spellings, to a call with dropout that
runs once per read:

    F.dropout(x, p, training=self.training)
    attend(..., dropout=0.0 if not self.training else p)

Any other read (`if self.training:`, into a variable, by another package's function) may decide
anything.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch

from onward.model_state.patches import Patch, patched

Place = tuple[CodeType, int]  # a code object, and the offset of an instruction in it

_TORCH = str(Path(torch.__file__).parent)
_ONWARD = str(Path(__file__).parents[1])
_DROPOUT = f"{_TORCH}/nn/modules/dropout.py"
# the part of torch that models call; the rest traces them, and its reads do not count
_RUNS = tuple(f"{_TORCH}/{name}" for name in ("nn/", "utils/checkpoint.py"))
_FUNCTIONAL: Any = torch.nn.functional
# dropout functions with the parameters `(x, p, training, ...)`
_DROPPING = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip
_RATIOS = ("p", "dropout", "dropout_p")


class ModeReads:
    """The mode reads of one trace. other: a place that reads the mode for more than dropout; ""
    where there is none. dropped: how many calls have applied dropout."""

    def __init__(self) -> None:
        self.other = ""
        self.dropped = 0
        self._reads: Counter[Place] = Counter()
        self._calls: Counter[Place] = Counter()
        self._always: set[Place] = set()  # calls with dropout that do not read the mode themselves
        self._flagged: set[Place] = set()  # calls that take a flag `training`, not a ratio alone

    def read(self, frame: FrameType) -> None:
        """Records that code in this frame reads a module's `training`."""
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            if file != _DROPOUT and file.startswith(_RUNS):
                self.asked(frame)
        elif not file.startswith(_ONWARD):
            self._reads[frame.f_code, frame.f_lasti] += 1

    def asked(self, frame: FrameType) -> None:
        """Records that code in this frame reads the mode for more than dropout."""
        if not self.other:
            self.other = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"

    def called(self, frame: FrameType, drops: bool, flag: bool, asks: bool) -> None:
        """Records a call, from this frame, of a function with dropout. drops: whether it applies
        dropout. flag, asks: see `noted_call`."""
        file = frame.f_code.co_filename
        if file.startswith(_TORCH) and not file.startswith(_RUNS):
            return  # torch's function modes call the function again
        self.dropped += drops
        if file == _DROPOUT:
            return
        place = frame.f_code, frame.f_lasti
        self._calls[place] += 1
        if flag:
            self._flagged.add(place)
        if drops and not asks:
            self._always.add(place)

    def settle(self) -> None:
        """Matches reads with the calls that they switch; sets `other` where one has none."""
        calls: Counter[tuple[CodeType, Any]] = Counter()
        for (code, at), n in self._calls.items():
            calls[code, _end(code, at)] += n
        flagged = {(code, _end(code, at)) for code, at in self._flagged}
        governed: set[tuple[CodeType, Any]] = set()
        for (code, at), n in self._reads.items():
            found = None if self.other else _switched(code, at)
            if (
                found is None
                or calls[code, found.end] != n
                or (found.by_flag and (code, found.end) not in flagged)
            ):
                self.other = self.other or f"{code.co_qualname}, line {code.co_firstlineno}"
                return
            governed.add((code, found.end))
        for code, at in self._always:
            if (code, _end(code, at)) not in governed:
                self.other = self.other or f"{code.co_qualname} drops in any mode"


@contextmanager
def noting_mode(model: torch.nn.Module) -> Iterator[ModeReads]:
    """A context that records where the forward of `model`, in this thread, reads its mode. Yields
    the reads; they are settled at the end."""
    reads = ModeReads()
    base = torch.nn.Module
    for m in model.modules():
        if any(map(_has_own_flag, (c for c in type(m).__mro__ if c not in (base, object)))):
            reads.other = f"{type(m).__qualname__}, which may read its flag past the attribute"
    with patched(_places(reads)):
        _readers.append((threading.get_ident(), reads))
        try:
            yield reads
        finally:
            _readers.pop()
    reads.settle()


_readers: list[tuple[int, ModeReads]] = []


@functools.lru_cache(maxsize=4096)
def _has_own_flag(cls: type) -> bool:
    """Returns whether the class's code may bypass the attribute: `vars(self)["training"]`."""
    held = vars(cls)
    found = [getattr(x, "__func__", None) or getattr(x, "fget", None) or x for x in held.values()]
    codes = [x.__code__ for x in found if isinstance(x, FunctionType)]
    return "training" in held or "__getattribute__" in held or any(map(_says_training, codes))


def _says_training(code: CodeType) -> bool:
    return any(
        _says_training(x) if isinstance(x, CodeType) else x == "training" for x in code.co_consts
    )


def noted_call(drops: bool, flag: bool = False, asks: bool = False) -> None:
    """Records a call of one of our replacements for a function with dropout. drops: whether it
    applies dropout. flag: whether it takes an argument `training`. asks: whether it reads the
    module's mode itself."""
    if _readers and _readers[-1][0] == threading.get_ident():
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_ONWARD):
            assert frame.f_back is not None, "a model's code calls it"
            frame = frame.f_back
        _readers[-1][1].called(frame, drops, flag, asks)


def noted_question(depth: int = 2) -> None:
    """Records that the frame `depth` levels up asked whether gradients are on, if it is the
    model's code."""
    if _readers and _readers[-1][0] == threading.get_ident():
        frame = sys._getframe(depth)
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _ONWARD)) or file.startswith(_RUNS):
            _readers[-1][1].asked(frame)


def _places(reads: ModeReads) -> Iterator[Patch]:
    here = threading.get_ident()

    def get(m: Any) -> bool:
        if threading.get_ident() == here:
            reads.read(sys._getframe(1))
        try:
            return vars(m)["training"]
        except KeyError:
            raise AttributeError(
                f"'{type(m).__name__}' object has no attribute 'training'"
            ) from None

    def put(m: Any, value: bool) -> None:
        vars(m)["training"] = value

    def remove(m: Any) -> None:
        del vars(m)["training"]

    yield torch.nn.Module, "training", property(get, put, remove)
    for name in _DROPPING:
        plain = getattr(_FUNCTIONAL, name)
        if plain.__code__.co_filename == f"{_TORCH}/nn/functional.py":
            yield _FUNCTIONAL, name, _noting(plain)
        else:
            reads.other = f"{name}, which has been replaced"
    attend = _FUNCTIONAL.scaled_dot_product_attention
    if isinstance(attend, BuiltinFunctionType):
        yield _FUNCTIONAL, "scaled_dot_product_attention", _noting_attention(attend)


def _noting(plain: Callable[..., Any]) -> Callable[..., Any]:
    default = inspect.signature(plain).parameters["training"].default

    @functools.wraps(plain)  # masked rows look functions up by their names
    def called(*args: Any, **kwargs: Any) -> Any:
        on = args[2] if len(args) > 2 else kwargs.get("training", default)
        ratio = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        noted_call(bool(on) and ratio != 0, flag=True)
        return plain(*args, **kwargs)

    return called


def _noting_attention(plain: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        ratio = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        noted_call(ratio != 0)
        return plain(*args, **kwargs)

    return called


# ---- what the code around a read does with it


def _position(code: CodeType, at: int) -> tuple[int, int, int, int] | None:
    """Returns an instruction's lines and columns, (first line, last line, first column, last
    column), as in `ast`; None where the code object does not have them."""
    found = next(islice(code.co_positions(), at // 2, None), None)
    return None if found is None or None in found else found  # type: ignore[return-value]


def _end(code: CodeType, at: int) -> Any:
    """Returns the line and column where an instruction's call ends; None if unknown."""
    found = _position(code, at)
    return None if found is None else (found[1], found[3])


class DropoutSwitch(NamedTuple):
    """A call whose dropout a read switches. end: line and column of its end. by_flag: whether its
    argument `training` switches it, or else its ratio."""

    end: tuple[int, int]
    by_flag: bool


@functools.lru_cache(maxsize=256)
def _switched(code: CodeType, at: int) -> DropoutSwitch | None:
    """Returns the call whose dropout is all that the read at this instruction switches; None for
    any other read."""
    position, parents = _position(code, at), _parents(code)
    if position is None or parents is None:
        return None
    node = next((n for n in parents if _is_read(n, position)), None)
    if node is None:
        return None
    value, above = node, parents[node]
    if isinstance(above, ast.keyword) and above.arg == "training":
        return _switch(parents[above], by_flag=True)
    if isinstance(above, ast.Call) and _number(above, value) == 2 and _is_dropout(above.func):
        return _switch(above, by_flag=True)
    negated = isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not)
    if negated:
        value, above = above, parents[above]
    if not isinstance(above, ast.IfExp) or above.test is not value:
        return None
    off = above.body if negated else above.orelse
    if not (isinstance(off, ast.Constant) and type(off.value) in (int, float) and not off.value):
        return None
    outer = parents[above]
    if isinstance(outer, ast.keyword) and outer.arg in _RATIOS:
        return _switch(parents[outer], by_flag=False)
    return None


def _is_read(node: ast.AST, position: tuple[int, int, int, int]) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "training"
        and isinstance(node.value, ast.Name)
        and (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == position
    )


def _number(call: ast.Call, node: ast.AST) -> int:
    return next((i for i, x in enumerate(call.args) if x is node), -1)


def _is_dropout(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _DROPPING


def _switch(call: ast.AST, by_flag: bool) -> DropoutSwitch | None:
    if not isinstance(call, ast.Call) or call.end_lineno is None or call.end_col_offset is None:
        return None
    return DropoutSwitch((call.end_lineno, call.end_col_offset), by_flag)


@functools.lru_cache(maxsize=64)
def _parents(code: CodeType) -> dict[ast.AST, ast.AST] | None:
    """Returns AST node -> parent for a function's source, with the file's lines and columns; None
    without source, or where it is not ASCII or holds no function."""
    linecache.checkcache(code.co_filename)
    try:
        lines, first = inspect.getsourcelines(code)
        text = "".join(lines)
        tree = ast.parse(textwrap.dedent(text))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    indent = len(lines[0]) - len(lines[0].lstrip())
    inside = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    if not inside or not text.isascii():  # columns are bytes
        return None
    found: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            found[child] = node
    for node in found:
        if isinstance(node, (ast.expr, ast.keyword)) and node.end_lineno is not None:
            node.lineno += first - 1
            node.end_lineno += first - 1
            node.col_offset += indent
            node.end_col_offset = (node.end_col_offset or 0) + indent
    return found


__all__ = ["ModeReads", "noted_call", "noted_question", "noting_mode"]
