"""Loops over the experts of a mixture: one turn for all of them.

    expert_mask = one_hot(top_k_index, experts).permute(2, 1, 0)      # i64[E,K,T]
    for e in (expert_mask.sum((-1, -2)) > 0).nonzero():
        place, token = torch.where(expert_mask[e])
        y.index_add_(0, token, expert(weights[e], x[token]) * scale[token, place, None])

Only the data say which experts are hit, and by how many rows. Within a trace the loop has one turn,
in which `e` is an `Each`, the numbers of all experts. What is looked up by `e` has one tensor per
expert. The rows that `where` gives are those of all experts, sorted by expert (`Grouped`), and
their products are products by group. Where the code asks `e` for its number, the turn is for the
experts with the same answer, and another turn follows for the others.

Mixtures of experts by sorted rows: Gale et al. 2022, arXiv 2211.15841.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from onward.capture.custom_ops.autocast import as_product
from onward.capture.custom_ops.grouped import rows_by_group
from onward.capture.expert_loops.loop_source import asking_frame, begins, skips_nothing
from onward.capture.expert_loops.one_hot import OneHot
from onward.capture.masked_rows.rows import (
    FIX,
    OPERATORS,
    ROWS_OF,
    RULES,
    RUNNING,
    Beside,
    MaskedRows,
    applied,
    found_in,
    is_tensor,
    refusal,
    rule,
    tensors_in,
)
from onward.errors import CaptureError

Tensor = torch.Tensor
# Attributes of a tensor that are its numbers, and methods that read none.
_VIEWS = ("T", "mT", "H", "mH", "data", "grad", "real", "imag")
_OF_SHAPE = ("size", "dim", "is_floating_point", "numel", "__len__")


def of_loop(what: str) -> CaptureError:
    return CaptureError(
        f"{what} in a loop over mixture-of-experts experts has no translation; {FIX}"
    )


def may_change(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function may change a tensor in a turn for several experts: for rows of theirs, and
    not once for all."""
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if not RUNNING or not in_place:
        return True
    loop, own = RUNNING[-1], found_in((args, kwargs))
    alone = isinstance(loop, Loop) and len(loop.now) == 1
    return any(r.owner.loop is loop if isinstance(r, Grouped) else alone for r in own)


class Loop:
    """A loop over groups. hit: `b[E]`, which of them have a turn. now: those of this turn. of_all:
    whether the loop is over all groups, by numbers that are Python's in eager mode."""

    def __init__(self, hit: Tensor, of_all: bool = False) -> None:
        self.hit, self.groups, self.of_all = hit, int(hit.shape[0]), of_all
        self.now: list[int] = [*range(self.groups)]
        self.settled = False  # whether rows of this turn have been told from others
        self._several = False  # whether there is a turn for more than one
        self._read, self._added = dict[int, Tensor](), set[int]()  # by their memory, in all turns

    def turns(self, rank: int) -> Iterator[Each]:
        """rank: of what each turn is given, a number."""
        number = torch.arange(self.groups).view(-1, *[1] * rank)
        waiting = [self.now]
        self._waiting = waiting
        RUNNING.append(self)
        try:
            while waiting:
                self.now, self.settled = waiting.pop(0), False
                yield Each(self, number, [*range(self.groups)])
        finally:
            RUNNING.remove(self)

    def heed(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes note of a call of the loop's. Raises CaptureError where it reads what rows are
        added to: eager has the rows of some experts in it then, and not those of others."""
        attribute = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
        if (attribute and attribute not in _VIEWS) or name in _OF_SHAPE:
            return
        given = tensors_in((args, kwargs))
        if name == "index_add_" and is_tensor(args[0]):
            self._added.add(given.pop(0).untyped_storage()._cdata)
        self._several |= len(self.now) > 1
        self._read.update({x.untyped_storage()._cdata: x for x in given})
        if self._several and self._added.intersection(self._read):
            raise of_loop("a read of what rows are added to,")

    def ask(self, values: Sequence[Any]) -> Any:
        """What the groups of this turn say: those that say otherwise get another turn."""
        answer = values[self.now[0]]
        others = [g for g in self.now if values[g] != answer]
        if others:
            if self.of_all and 2 * len({*values}) > self.groups:  # each with the rows of all
                raise of_loop("a question to each expert's number")
            if self.settled:
                raise of_loop("a question to an expert's number after its rows were used")
            self.now = [g for g in self.now if values[g] == answer]
            self._waiting.append(others)
        return answer

    def member(self, group: Tensor) -> Tensor:
        """`b[N]`: the rows that count in this turn, by the group of each, `i64[N]`."""
        self.settled = True
        found = self.hit.reshape(-1)[group]
        if len(self.now) == self.groups:
            return found
        own = torch.tensor([g in self.now for g in range(self.groups)])
        return found & own[group]

    def limited(self, member: Tensor) -> Tensor:
        """`b[N]`: the rows of `member`, in a turn for one expert; none where it is not hit."""
        self.settled = True
        return member & self.hit.reshape(-1)[self.now[0]]

    def rows(self, mask: Each) -> tuple[Grouped, ...]:
        """`where(mask)`: the rows of all groups, sorted by group."""
        if mask.hot is None:
            raise CaptureError(
                "a loop over mixture-of-experts experts picks tokens by a mask that is not "
                "torch.nn.functional.one_hot of the expert indices, so that a token may "
                f"belong to several; {FIX}"
            )
        index, _, kept = mask.hot
        if mask.full.shape[0] != self.groups:
            raise of_loop("other experts than the mask has")
        flat = index.reshape(-1)
        order = flat.argsort(stable=True)
        group = flat.index_select(0, order)
        numbers = torch.arange(mask.full.shape[0]).unsqueeze(1)
        ends = (group.unsqueeze(0) <= numbers).long().sum(1)
        chosen = None if kept is None else kept.reshape(-1).index_select(0, order)
        owner, found, size = _Rows(object(), self, group, ends, chosen), [], index.numel()
        for d in range(index.dim()):
            size = size // index.shape[d]
            place = order if d == 0 and index.dim() == 1 else order // size % index.shape[d]
            found.append(Grouped(place, owner))
        return tuple(found)


@rule("__iter__")
def _turns(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loop over the numbers of what a mask chooses: over the experts that are hit."""
    hit, frame = args
    if not hit.numbers or not isinstance(hit.full.shape[0], int):
        raise refusal("a loop")
    if not begins(frame):
        raise CaptureError(
            "a loop over mixture-of-experts experts may do more than add tokens to its "
            "result, or its source cannot be read; fix: end each iteration with index_add_, "
            "and read no variable of another iteration"
        )
    return Loop(hit.member).turns(hit.dim() - 1)


@rule("tolist")
def _as_list(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The numbers of what a mask chooses, for a loop."""
    hit = args[0]
    if not hit.numbers or hit.dim() != 1:
        raise refusal("tolist")
    return _Hits(hit)


class _Hits:
    """A list of numbers that only data say."""

    def __init__(self, hit: MaskedRows) -> None:
        self._hit = hit

    def __iter__(self) -> Any:
        return applied(Tensor.__iter__, (self._hit, sys._getframe(1)), {})

    def _refuse(self, *args: Any) -> Any:
        raise refusal("tolist")

    __len__ = __bool__ = __getitem__ = __contains__ = __reversed__ = __repr__ = _refuse


class _Rows(NamedTuple):
    """Rows sorted by group. group: `i64[N]`. ends: `i64[E]`, where each ends. kept: `b[N]`."""

    key: object
    loop: Loop
    group: Tensor
    ends: Tensor
    kept: Tensor | None


def of_whole(x: Tensor, loop: Loop, ends: Tensor) -> Grouped:
    """Rows that lie by group already. ends: `i64[E]`, where each ends."""
    numbers = torch.arange(x.shape[0]).unsqueeze(0)
    group = (numbers >= ends.unsqueeze(1)).long().sum(0)
    return Grouped(x, _Rows(object(), loop, group, ends, None))


class Grouped(MaskedRows):
    """Rows of every group of a turn, sorted by group."""

    each_once = False

    def __init__(self, full: Tensor, owner: _Rows) -> None:
        self.full, self.owner, self.key = full, owner, owner.key
        self.numbers, self.name, self.rows = False, object(), None

    def with_rows(self, full: Any, numbers: bool = False) -> Any:
        if isinstance(full, (tuple, list)):
            return super().with_rows(full)
        return Grouped(full, self.owner)

    def added(self) -> Tensor:
        owner = self.owner
        member = owner.loop.member(owner.group)
        return member if owner.kept is None else member & owner.kept

    @property
    def member(self) -> Tensor:  # type: ignore[override]
        raise of_loop("the rows of one expert, taken together")

    @property
    def count(self) -> Any:  # type: ignore[override]
        return _Count(self.key)

    def numel(self) -> Any:
        return self.count


class _Count(Beside):
    """How many rows an expert has: more than none, where those without change nothing."""

    def __init__(self, key: object) -> None:
        setattr(self, ROWS_OF, key)

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise of_loop("the number of an expert's rows")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise of_loop("the number of an expert's rows")

    def _compared(self, name: str, other: Any) -> bool:
        said = OF_COUNTS[name].get(other) if type(other) is int else None
        if said is None or not skips_nothing(asking_frame()):
            raise of_loop("the number of an expert's rows")
        return said

    def __bool__(self) -> bool:
        return self._compared("ne", 0)

    def __eq__(self, other: object) -> bool:
        return self._compared("eq", other)

    def __ne__(self, other: object) -> bool:
        return self._compared("ne", other)

    def __gt__(self, other: Any) -> bool:
        return self._compared("gt", other)

    def __ge__(self, other: Any) -> bool:
        return self._compared("ge", other)

    def __lt__(self, other: Any) -> bool:
        return self._compared("lt", other)

    def __le__(self, other: Any) -> bool:
        return self._compared("le", other)

    __hash__ = object.__hash__


# Comparisons of a count with 0 and with 1, of which one answer means that there are rows.
OF_COUNTS: dict[str, dict[int, bool]] = {
    "eq": {0: False}, "ne": {0: True}, "gt": {0: True}, "le": {0: False}, "ge": {1: True},
    "lt": {1: False},
}  # fmt: skip


class Each(Beside):
    """A tensor of every group, `full [E, ...]`. values: what each is, where Python may know. hot:
    what its numbers are the one-hot of, in dims of one group."""

    def __init__(
        self, loop: Loop, full: Tensor, values: Sequence[Any] | None = None,
        hot: OneHot | None = None,
    ) -> None:  # fmt: skip
        self.loop, self.full, self.values, self.hot = loop, full, values, hot

    def like(self, full: Any) -> Any:
        if isinstance(full, (tuple, list)):
            return tuple(Each(self.loop, x) for x in full)
        return Each(self.loop, full)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return of_each(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        func = getattr(Tensor, name, None)
        if name.startswith("__") or func is None:
            raise AttributeError(name)
        if not callable(func):
            raise of_loop(f"{name}")
        return lambda *args, **kwargs: of_each(func, (self, *args), kwargs)

    def joined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return of_each(func, args, kwargs)

    def _said(self) -> Any:
        if self.values is None:
            raise of_loop("a choice by an expert's tensor")
        return self.loop.ask(self.values)

    def item(self) -> Each:
        return self

    def __bool__(self) -> bool:
        return bool(self._said())

    def __int__(self) -> int:
        return int(self._said())

    __index__ = __int__

    def __format__(self, spec: str) -> str:
        return format(self._said(), spec)

    def __hash__(self) -> int:
        if self.loop.of_all and self.values is not None:
            raise of_loop("an expert's number as a key")
        return object.__hash__(self)

    def dim(self) -> int:
        return self.full.dim() - 1

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    __class__ = property(lambda self: Tensor)  # type: ignore[assignment]  # as a forward asks
    ndim = property(dim)
    shape = property(lambda self: self.full.shape[1:])
    dtype = property(lambda self: self.full.dtype)
    device = property(lambda self: self.full.device)
    requires_grad = property(lambda self: self.full.requires_grad)
    T = property(lambda self: of_each(Tensor.t, (self,), {}))
    mT = property(lambda self: of_each(Tensor.transpose, (self, -1, -2), {}))


def is_each(x: Any) -> bool:
    return type(x) is Each


def each_in(args: Any) -> list[Each]:
    """The groups' tensors among arguments."""
    if isinstance(args, dict):
        return each_in(list(args.values()))
    if isinstance(args, (tuple, list)):
        return [e for a in args for e in each_in(a)]
    return [args] if type(args) is Each else []


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: of_each(getattr(Tensor, name), (self, *others), {})


for _name in OPERATORS:
    if hasattr(Tensor, _name):
        setattr(Each, _name, _operator(_name))


# ---- functions of them

_COMPARED = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "add": operator.add, "sub": operator.sub,
}  # fmt: skip
_KEEPING = ("long", "to", "int", "detach", "clone", "contiguous", "squeeze", "view", "reshape",
            "bool", "flatten")  # fmt: skip
_BY_DIMS = ("transpose", "unsqueeze", "squeeze", "select", "flatten")


def of_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of torch's on arguments some of which are of each group."""
    name = getattr(func, "__name__", str(func)).strip("_")
    if name == "getitem" and is_tensor(args[0]):
        return _taken(args[0], args[1])
    rows = found_in((args, kwargs))
    if rows:
        return _with_rows(func, name, args, kwargs, rows)
    first = each_in((args, kwargs))[0]
    if (name == "where" and len(args) == 1) or (name == "nonzero" and kwargs.get("as_tuple")):
        return first.loop.rows(first)
    if not isinstance(args[0], Each) or len(each_in((args, kwargs))) > 1:
        raise of_loop(f"{name} of experts")
    made = first.like(_alone(func, name, first, args[1:], kwargs))
    if isinstance(made, Each):
        if name in _COMPARED and first.values is not None and isinstance(args[1], int):
            made.values = [_COMPARED[name](v, args[1]) for v in first.values]
        elif name in _KEEPING or name == "getitem":
            made.values = first.values if made.full.numel() == len(first.full) else None
            same = name not in ("squeeze", "view", "reshape", "flatten", "getitem")
            unchanged = same or tuple(made.shape) == tuple(first.shape)
            made.hot = first.hot if unchanged else _squeezed(first, made)
    return made


def _squeezed(x: Each, made: Each) -> OneHot | None:
    """What a mask is the one-hot of once its first dim, of size 1, is dropped."""
    if x.hot is None or x.dim() < 2 or tuple(x.shape) != (1, *made.shape):
        return None
    index, dim, kept = x.hot
    return OneHot(index.squeeze(0), dim, None if kept is None else kept.squeeze(0))


def _alone(
    func: Any, name: str, x: Each, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:  # fmt: skip
    """A function of one group's tensor, done to all of them."""
    full, rank = x.full, x.dim()
    if name == "getitem":
        index = rest[0] if isinstance(rest[0], tuple) else (rest[0],)
        if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
            raise of_loop("a look into an expert's tensor by another")
        return full[(slice(None), *index)]
    if name in ("view", "reshape"):
        return full.reshape(full.shape[0], *_flat(rest))
    if name == "t" and not rest:
        return full.transpose(1, 2) if rank == 2 else full
    if name == "squeeze" and not rest and not kwargs:
        return full.reshape(full.shape[0], *[n for n in full.shape[1:] if n != 1])
    if name == "permute":
        return full.permute(0, *[d % rank + 1 for d in _flat(rest)])
    if name in _BY_DIMS and rest and not kwargs:
        more = rank + (name == "unsqueeze")
        if name == "select":
            return full.select(rest[0] % rank + 1, rest[1])
        return func(full, *[int(d) % more + 1 for d in rest])
    if name in ("chunk", "split"):
        pieces, *where = rest
        dim = kwargs.get("dim", where[0] if where else 0)
        return func(full, pieces, dim=dim % rank + 1)
    if name in _ELEMENTWISE and not any(is_tensor(a) for a in (*rest, *kwargs.values())):
        return func(full, *rest, **kwargs)
    raise of_loop(f"{name} of experts")


def _flat(given: Sequence[Any]) -> Sequence[Any]:
    """Sizes or dims that are given as numbers or as one list, as one sequence."""
    one = len(given) == 1 and isinstance(given[0], (tuple, list))
    return given[0] if one else given


_ELEMENTWISE = ("float", "double", "half", "bfloat16", "long", "int", "bool", "to", "type",
                "detach", "clone", "contiguous", "mul", "add", "sub", "truediv", "div", "neg",
                "eq", "ne", "lt", "le", "gt", "ge", "exp", "sigmoid", "tanh", "abs")  # fmt: skip


def _numbers(x: Any) -> bool:
    return type(x) is Each and x.values is not None


def looked_up(x: Tensor, number: Each, hot: OneHot | None) -> Each:
    """`x[e]`: a tensor of each group. hot: what x is the one-hot of."""
    groups, size = number.loop.groups, x.shape[0]
    more = hot is None and isinstance(size, int) and size > groups
    full = x[:groups] if more else x
    full = full if number.dim() == 0 else full.unsqueeze(1)
    if number.dim() > 1 or number.values != [*range(groups)]:
        raise of_loop("a look-up by something else than an expert's number")
    own = None
    if hot is not None and hot.dim == 0:
        index, _, kept = hot
        own = hot
        if number.dim():
            own = OneHot(index.unsqueeze(0), 0, None if kept is None else kept.unsqueeze(0))
    return Each(number.loop, full, None, own)


def _taken(x: Tensor, index: Any) -> Any:
    """`x[token, e, None]`: by rows, and by their expert's number."""
    parts = index if isinstance(index, tuple) else (index,)
    rows = found_in(parts)
    if not rows and (alone := each_in(parts)) and len(alone[0].loop.now) == 1:
        return _of_one(x, parts, alone)
    if not rows or not all(_numbers(p) or not isinstance(p, Each) for p in parts):
        raise of_loop("a look-up by an expert's number and others")
    own = _of_one_loop(rows, each_in(parts))
    rows_of = tuple(own.with_rows(own.owner.group) if _numbers(p) else p for p in parts)
    return applied(Tensor.__getitem__, (x, rows_of), {})


def _of_one(x: Tensor, parts: Sequence[Any], numbers: Sequence[Each]) -> Tensor:
    """`mask[:, e]` in a turn for one expert: nothing where the loop leaves it out."""
    loop = numbers[0].loop
    values = numbers[0].values
    if x.dtype != torch.bool or len(numbers) > 1 or values is None or numbers[0].dim():
        raise of_loop("a look-up by an expert's number and others")
    number = values[loop.now[0]]
    made = x[tuple(number if isinstance(p, Each) else p for p in parts)]
    return loop.limited(made)


def _of_one_loop(rows: Sequence[MaskedRows], each: Sequence[Each]) -> Grouped:
    own = rows[0]
    if not isinstance(own, Grouped) or any(r.key != own.key for r in rows):
        raise of_loop("rows of two masks")
    if any(e.loop is not own.owner.loop for e in each):
        raise of_loop("a loop within another")
    return own


def _with_rows(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: list[MaskedRows]
) -> Any:
    own = _of_one_loop(rows, each_in((args, kwargs)))
    if name in ("linear", "matmul", "mm") and args and args[0] is rows[0] and len(rows) == 1:
        call = [*args[1:], *kwargs.values()]
        matrix, bias = call[0], call[1] if len(call) > 1 else None
        if own.dim() != 2 or not is_each(matrix) or matrix.dim() != 2:
            raise of_loop(f"{name} by experts of another form")
        full = matrix.full.transpose(1, 2) if name == "linear" else matrix.full
        made = as_product(rows_by_group(own.full, full, own.owner.ends[: full.shape[0]]))
        made = own.with_rows(_none_beyond(made, full.shape[0], own))
        return made if bias is None else applied(torch.add, (made, _per_row(bias, own, 2)), {})
    if func.__name__ not in RULES:
        raise of_loop(f"{name} by experts")
    rank = max(r.dim() for r in rows)

    def of_rows(x: Any) -> Any:
        return _per_row(x, own, rank) if is_each(x) else x

    return applied(
        func, tuple(map(of_rows, args)), {k: of_rows(v) for k, v in kwargs.items()}
    )  # fmt: skip


def _per_row(x: Any, own: Grouped, rank: int) -> Any:
    """Each row's own, of its group: `[N, 1.., ...]` of `rank` dims."""
    if not is_each(x):
        return x
    if x.dim() > rank - 1:
        raise of_loop("an expert's tensor with more dims than a row")
    size = x.full.shape[0]
    each = x.full.index_select(0, own.owner.group.clamp(max=size - 1))
    each = each.view(each.shape[0], *[1] * (rank - 1 - x.dim()), *x.shape)
    return own.with_rows(_none_beyond(each, size, own))


def _none_beyond(each: Tensor, size: int, own: Grouped) -> Tensor:
    """Not a number for rows of an expert that there is no weight of, where eager has an error."""
    if max(own.owner.loop.now) < size:
        return each
    within = (own.owner.group < size).view(-1, *[1] * (each.dim() - 1))
    if not each.is_floating_point():
        raise of_loop("an expert's number beyond those of its tensor")
    return torch.where(within, each, float("nan"))


__all__ = [
    "OF_COUNTS",
    "Each",
    "Grouped",
    "Loop",
    "OneHot",
    "each_in",
    "looked_up",
    "of_each",
    "of_whole",
]
