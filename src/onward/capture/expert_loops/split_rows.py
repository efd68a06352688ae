"""Rows cut where data say, each piece by a matrix of its own, and put together again.

    sizes = gates.long().sum(0).tolist()                              # how many rows of each expert
    pieces = x.split(sizes, dim=0)
    y = torch.cat([F.linear(p, weights[i]) for i, p in enumerate(pieces)], dim=0)

How long the pieces are, data alone say. Within a trace each is an `ExpertRows`, which notes what is
done to it; where all of them are put together in their order, it is done once, to the rows of all
experts in their groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from onward.capture.expert_loops.batched_turn import Each, Grouped, Loop, each_in, of_each, of_whole
from onward.capture.expert_loops.counts import Counts, of_pieces
from onward.capture.masked_rows.rows import OPERATORS, applied, found_in, is_tensor

Tensor = torch.Tensor


class Cut(NamedTuple):
    """How rows are cut. counts: `i64[E]`. taken: the tensor and the number by which another was
    taken of it. short: whether the counts may be less than all rows."""

    full: Tensor
    counts: Tensor
    taken: Callable[[Any], tuple[Tensor, int] | None]
    short: bool = False


class ExpertRows:
    """The rows of one number, and what is done to them: nothing, or a function of them."""

    def __init__(
        self, cut: Cut, number: int, func: Any = None, args: Any = (), kwargs: Any = None
    ) -> None:
        self._cut, self._number, self._made = cut, number, (func, args, kwargs or {})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return done(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        func = getattr(Tensor, name, None)
        if name.startswith("_") or func is None:
            raise AttributeError(name)
        if not callable(func):
            raise of_pieces(name)
        return lambda *args, **kwargs: done(func, (self, *args), kwargs)

    @property
    def number(self) -> int:
        return self._number

    @property
    def counts(self) -> Tensor:
        return self._cut.counts

    def __len__(self) -> int:
        raise of_pieces("len()")

    def __bool__(self) -> bool:
        raise of_pieces("bool()")

    __class__ = property(lambda self: Tensor)  # type: ignore[assignment]  # as a forward asks


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: done(getattr(Tensor, name), (self, *others), {})


for _name in OPERATORS:
    if hasattr(Tensor, _name):
        setattr(ExpertRows, _name, _operator(_name))
ExpertRows.__hash__ = object.__hash__  # type: ignore[method-assign]


def pieces_in(args: Any) -> list[ExpertRows]:
    if isinstance(args, dict):
        return pieces_in(list(args.values()))
    if isinstance(args, (tuple, list)):
        return [p for a in args for p in pieces_in(a)]
    return [args] if type(args) is ExpertRows else []


def cut(args: Sequence[Any], kwargs: dict[str, Any], taken: Any) -> tuple[ExpertRows, ...]:
    """`x.split(counts)`."""
    names = ("tensor", "split_size_or_sections", "dim")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given["tensor"]
    sizes = next(v for k, v in given.items() if type(v) is Counts)
    if not is_tensor(x) or given.get("dim", 0) not in (0, -x.dim()):
        raise of_pieces("another split")
    whole = Cut(x, sizes.tensor, taken)
    return tuple(ExpertRows(whole, i) for i in range(len(sizes)))


def done(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function on arguments some of which are pieces: noted, or of all of them."""
    name = getattr(func, "__name__", str(func)).strip("_")
    found = pieces_in((args, kwargs))
    if name in ("cat", "concat", "concatenate"):
        given = {**dict(zip(("tensors", "dim"), args, strict=False)), **kwargs}
        if given.get("dim", given.get("axis", 0)) != 0:
            raise of_pieces("cat of features")
        return together(given["tensors"])
    if any(p._cut is not found[0]._cut or p._number != found[0]._number for p in found):
        raise of_pieces(f"{name} of several pieces")
    return ExpertRows(found[0]._cut, found[0]._number, func, args, kwargs)


def together(given: Sequence[Any], rest: Tensor | None = None) -> Tensor:
    """All pieces in their order, as one tensor. rest: where the counts end before the rows do, what
    stands there; else it is not a number, where eager has fewer rows."""
    pieces = list(given)
    own = all(type(p) is ExpertRows and p._cut is pieces[0]._cut for p in pieces)
    if not own or [p._number for p in pieces] != [*range(pieces[0]._cut.counts.shape[0])]:
        raise of_pieces("cat of others, or in another order,")
    whole = pieces[0]._cut
    ends = whole.counts.cumsum(0)
    rows = of_whole(whole.full, Loop(torch.ones_like(ends, dtype=torch.bool)), ends)
    made = _of_all(pieces, whole, rows, {})
    if not found_in(made):
        raise of_pieces("cat")
    full: Tensor = made.full
    if not whole.short:
        return full
    if rest is None and not full.is_floating_point():
        raise of_pieces("cat of whole numbers")
    within = torch.arange(full.shape[0]) < ends[-1]
    within = within.view(-1, *[1] * (full.dim() - 1))
    return torch.where(within, full, float("nan") if rest is None else rest)


def _of_all(values: Sequence[Any], whole: Cut, rows: Grouped, known: dict[int, Any]) -> Any:
    """What each piece has, of all: rows in groups, a tensor of each, or what they share. known: by
    the first piece, that of several readers."""
    first = values[0]
    if all(type(v) is ExpertRows for v in values):
        held = known.get(id(first))
        if held is None or any(a is not b for a, b in zip(held[0], values, strict=True)):
            held = known[id(first)] = (values, _of_pieces(values, whole, rows, known))
        return held[1]
    if all(v is first for v in values):
        return first
    if all(is_tensor(v) for v in values):
        base = _taken_in_order([whole.taken(v) for v in values])
        return Each(rows.owner.loop, torch.stack(list(values)) if base is None else base)
    if all(type(v) is type(first) and v == first for v in values):
        return first
    raise of_pieces("different arguments")


def _of_pieces(values: Sequence[Any], whole: Cut, rows: Grouped, known: dict[int, Any]) -> Any:
    calls = [v._made for v in values]
    func, args, kwargs = calls[0]
    if func is None and all(c[0] is None for c in calls):
        return rows
    if any((c[0], len(c[1]), [*c[2]]) != (func, len(args), [*kwargs]) for c in calls):
        raise of_pieces("different functions")
    all_args = tuple(_of_all([c[1][i] for c in calls], whole, rows, known)
                     for i in range(len(args)))  # fmt: skip
    all_kwargs = {k: _of_all([c[2][k] for c in calls], whole, rows, known) for k in kwargs}
    of = of_each if each_in((all_args, all_kwargs)) else applied
    return of(func, all_args, all_kwargs)


def _taken_in_order(taken: Sequence[tuple[Tensor, int] | None]) -> Tensor | None:
    """The tensor that all were taken of, from its first to its last."""
    bases = {id(t[0]): t[0] for t in taken if t is not None}
    numbers = [None if t is None else t[1] for t in taken]
    base = next(iter(bases.values()), None)
    if base is None or len(bases) > 1 or numbers != [*range(base.shape[0])]:
        return None
    return base


__all__ = ["Cut", "ExpertRows", "cut", "done", "pieces_in", "together"]
