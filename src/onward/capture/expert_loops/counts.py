"""Where rows are cut: how many rows each number has, and their sums, as data say.

    counts = ids.flatten().bincount(minlength=experts)                # i64[E]
    start = 0
    for i, n in enumerate(counts):
        if n == 0:
            continue
        end = start + n
        parts.append(experts[i](x[start:end]))
        start = end
    y = torch.cat(parts)

Within a trace nobody knows these numbers. A tensor of one number is known as the `Sum` of counts
that it is; the rows between two of them are `ExpertRows` (split_rows.py). What `tolist` gives is
known as `Counts`, for `split` alone. A turn without rows may be taken: what eager leaves out there
has no rows (loop_source.py).
"""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from onward.capture.expert_loops.batched_turn import OF_COUNTS
from onward.capture.expert_loops.loop_source import asking_frame, lists_of_pieces
from onward.capture.masked_rows.rows import is_tensor
from onward.errors import CaptureError

Tensor = torch.Tensor
_MOST = 1024  # pieces


def of_pieces(what: str) -> CaptureError:
    return CaptureError(
        f"{what} of rows that are split by sizes held in a tensor has no translation; fix: "
        "compute with the tensor, or torch.cat all pieces in their order"
    )


class Sum(NamedTuple):
    """The number `counts[first:last].sum()`. counts: `i64[E]`."""

    counts: Tensor
    first: int
    last: int


class DataNumber:
    """A number that only data say: nothing may be asked of it."""

    def _refuse(self, *args: Any) -> Any:
        raise of_pieces("a number read into Python")

    __int__ = __index__ = __float__ = __bool__ = __format__ = __str__ = __repr__ = _refuse
    __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = _refuse
    __mod__ = __neg__ = __add__ = __radd__ = _refuse
    __eq__ = __ne__ = __gt__ = __ge__ = __lt__ = __le__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


def joined(a: Any, b: Any) -> Sum | None:
    """The sum of a sum, or of the number 0, and of the counts next to it; None for any others."""
    if type(a) is int or type(b) is int:
        number, own = (a, b) if type(a) is int else (b, a)
        return own if number == 0 and isinstance(own, Sum) else None
    if not isinstance(a, Sum) or not isinstance(b, Sum) or a.counts is not b.counts:
        return None
    return Sum(a.counts, a.first, b.last) if a.last == b.first else None


class Counts(list[Any]):
    """What `tolist` gives of whole numbers that data say. tensor: `i64[E]`."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(DataNumber() for _ in range(tensor.shape[0]))
        self.tensor = tensor


def are_counts(x: Any) -> bool:
    """Whether a tensor of a trace is of one dim, of whole numbers that nobody knows."""
    own = isinstance(x, FakeTensor) and x.constant is None and x.dtype == torch.int64
    return own and x.dim() == 1 and isinstance(x.shape[0], int) and 1 < x.shape[0] <= _MOST


class _Asked(NamedTuple):
    """A loop that asks, in each turn, whether there are rows. turns: the number asked for in each.
    lines: its first and last. lists: those to which it appends."""

    frame: FrameType
    lines: tuple[int, int]
    lists: list[list[Any]]
    turns: list[int]


class Sums:
    """What is known of a trace's tensors of one number, and of tables of such."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Any]] = {}  # a Sum; a table; "zeros"; a question
        self._asked: list[_Asked] = []

    def _of(self, x: Any) -> Any:
        held = self._known.get(id(x))
        return None if held is None or held[1] != x._version else held[2]

    def _know(self, x: Tensor, what: Any) -> None:
        if what is not None:
            self._known[id(x)] = (x, x._version, what)

    def of(self, x: Any) -> Sum | None:
        """The sum of counts that a tensor is; None for any other."""
        found = self._of(x) if is_tensor(x) else None
        return found if isinstance(found, Sum) else None

    def _element(self, x: Tensor, i: int) -> Sum | None:
        """`x[i]`, of counts or of their running sums."""
        i, table = i % x.shape[0], self._of(x)
        if isinstance(table, _Table):
            return Sum(table.counts, 0, i + table.shift)
        return Sum(x, i, i + 1) if are_counts(x) else None

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """What a function has made of counts."""
        first: Any = args[0] if args else None
        name = name.strip("_")
        if name == "unbind" and are_counts(first):
            for i, x in enumerate(made):
                self._know(x, self._element(first, i))
        if not isinstance(made, FakeTensor) or made.is_floating_point():
            return
        match name:
            case "zeros" | "new_zeros" | "zeros_like":
                self._know(made, "zeros")
            case "getitem" if type(args[1]) is int and is_tensor(first) and first.dim() == 1:
                if isinstance(first.shape[0], int):
                    self._know(made, self._element(first, args[1]))
            case "add" | "radd":
                pair = [a if type(a) is int else self.of(a) for a in args]
                if len(pair) == 2 and not kwargs:
                    self._know(made, joined(*pair))
            case "cumsum" if are_counts(first):
                self._know(made, _Table(first, 1))
            case "cat" | "concat" | "concatenate":
                both = [*first] if isinstance(first, (list, tuple)) else []
                if len(both) == 2 and self._of(both[0]) == "zeros" and both[0].shape[0] == 1:
                    self._know(made, self._moved(both[1]))
            case "eq" | "ne" | "gt" | "ge" | "lt" | "le":
                own, other = self.of(first), args[1]
                said = OF_COUNTS[name].get(other) if type(other) is int else None
                if own is not None and said is not None:
                    self._know(made, (own, said))
            case _:
                pass

    def _moved(self, x: Any) -> Any:
        """Running sums with a zero before them."""
        table = self._of(x) if is_tensor(x) else None
        return _Table(table.counts, 0) if isinstance(table, _Table) and table.shift else None

    def between(self, index: Any) -> Sum | None:
        """The counts between the bounds of `x[start:end]`; None where something else bounds it."""
        if not isinstance(index, slice) or index.step not in (None, 1):
            return None
        end = self.of(index.stop)
        if end is None or end.first != 0:
            return None
        begin = index.start
        if begin is None or (type(begin) is int and begin == 0):
            return end if end.last == 1 else None
        start = self.of(begin)
        if start is None or start.counts is not end.counts or start.first != 0:
            return None
        return Sum(end.counts, start.last, end.last) if end.last == start.last + 1 else None

    # ---- questions

    def said(self, x: Any) -> bool | None:
        """What `bool(x)` says where there are rows; None where it is no such question."""
        held = self._of(x) if is_tensor(x) else None
        if type(held) is not tuple:
            return None
        own, said = held
        frame = asking_frame()
        found = None if own.last != own.first + 1 else lists_of_pieces(frame, said)
        if frame is None or found is None:
            return None
        names, lines = found
        lists = [frame.f_locals.get(n) for n in names]
        if any(type(x) is not list for x in lists):
            return None
        last = self._asked[-1] if self._asked else None
        same = last is not None and last.frame is frame and last.lines == lines
        if last is None or not same or own.first == 0:
            last = _Asked(frame, lines, lists, [])  # type: ignore[arg-type]
            self._asked.append(last)
        last.turns.append(own.first)
        return said

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether `cat` is of a list of such a loop; refuses one of other numbers than it asked."""
        given: Any = args[0] if args else kwargs.get("tensors")
        found = [a for a in self._asked if any(given is x for x in a.lists)]
        for asked in found:
            if asked.turns != [getattr(p, "number", None) for p in given]:
                raise of_pieces("cat of others than a loop asks for,")
        return bool(found)

    def check_turn(self) -> None:
        """Refuses a write within a loop that asks for rows: eager leaves some of its turns out."""
        frame = asking_frame()
        while frame is not None:
            for asked in self._asked:
                first, end = asked.lines
                if asked.frame is frame and first <= frame.f_lineno <= end:
                    raise of_pieces("a write in a loop that asks for them")
            frame = frame.f_back


class _Table(NamedTuple):
    """Running sums of counts: its element i is that of the first `i + shift`."""

    counts: Tensor
    shift: int


__all__ = ["Counts", "DataNumber", "Sum", "Sums", "are_counts", "of_pieces"]
