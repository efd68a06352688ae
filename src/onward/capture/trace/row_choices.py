"""Where chosen rows begin: the choices by a mask of data that a forward makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from onward.capture.expert_loops.batched_turn import (
    OF_COUNTS,
    Each,
    asking_frame,
    each_in,
    looked_up,
    may_change,
    of_each,
    of_loop,
)
from onward.capture.expert_loops.counts import Counts, DataNumber, Sums, are_counts, of_pieces
from onward.capture.expert_loops.loop_source import skips_nothing
from onward.capture.expert_loops.module_list import one_of_modules
from onward.capture.expert_loops.one_hot import OneHot, made_of
from onward.capture.expert_loops.split_rows import Cut, ExpertRows, cut, done, pieces_in, together
from onward.capture.masked_rows import functions
from onward.capture.masked_rows import reductions as sums
from onward.capture.masked_rows.functions import put_back
from onward.capture.masked_rows.rows import (
    SAID,
    MaskedRows,
    applied,
    choose,
    found_in,
    is_mask,
    is_tensor,
    row_numbers,
)
from onward.model_state.patches import patched

Tensor = torch.Tensor


_tolist: Any = FakeTensor.tolist


def _as_a_tensor(x: Any) -> Any:
    """`tolist` of a trace's tensor, of which a mode hears."""
    return Tensor.tolist(x)


def _of_rows(function: Any) -> Any:
    """`torch.pow` and the like, whose own reading of arguments ends the process where the first is
    no tensor and the second a number."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if found_in((args, kwargs)):
            return applied(function, args, kwargs)
        return function(*args, **kwargs)

    return called


class Choosing(TorchFunctionMode):
    """Within it, a choice by a boolean mask gives a `MaskedRows`; or the rows themselves where
    `whole` says that the mask leaves none out."""

    def __init__(self, whole: Callable[[Tensor], bool] | None = None) -> None:
        super().__init__()
        self._whole = whole
        self._keys: dict[int, tuple[Tensor, int, Any]] = {}
        self._one_hots: dict[int, tuple[Tensor, int, OneHot]] = {}
        self._taken: dict[int, tuple[Tensor, int, Tensor, int]] = {}
        self._sums = Sums()
        self._cuts: dict[tuple[int, int, int], Cut] = {}
        self._written: dict[int, tuple[Tensor, list[ExpertRows]]] = {}  # in part, by pieces

    def __enter__(self) -> Any:
        places: list[Any] = [
            (torch, f.__name__, _of_rows(f)) for f in (torch.pow, torch.float_power)
        ]
        places.append((torch.nn.ModuleList, "__getitem__", one_of_modules))
        if self._whole is None:
            places.append((FakeTensor, "tolist", _as_a_tensor))
        self._patches = patched(places)
        self._patches.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not may_change(name, args, kwargs):
            raise of_loop(f"{name} of what is no expert's")
        if name == "__setitem__" and isinstance(args[2], MaskedRows) and is_mask(args[1]):
            return put_back(args[0], args[1], self.key(args[1]), args[2])
        if each_in((args, kwargs)):
            if name == "__getitem__" and is_tensor(args[0]) and type(args[1]) is Each:
                return looked_up(args[0], args[1], self._one_hot(args[0]))
            of_one = of_each(func, args, kwargs)
            if is_tensor(of_one):
                self._note_one(of_one, args)
            return of_one
        if name == "__bool__" and hasattr(args[0], SAID) and skips_nothing(asking_frame()):
            return getattr(args[0], SAID)
        if found_in((args, kwargs)):
            return applied(func, args, kwargs)
        if self._whole is None:
            found = self._of_sums(func, name, args, kwargs)
            if found is not None:
                return found
        if name == "tolist" and self._whole is None and isinstance(args[0], FakeTensor):
            return _tolist(args[0])
        if name in ("split", "split_with_sizes") and any(
            type(a) is Counts for a in (*args, *kwargs.values())
        ):
            return cut(args, kwargs, self._taken_of)
        asked = name in _CAT and self._sums.check(args, kwargs)
        if asked or pieces_in((args, kwargs)):
            return done(func, args, kwargs)
        made = self._settled(self._begun(func, name, args, kwargs))
        if made is None:
            made = func(*args, **kwargs)
            self._note(func, name, args, kwargs, made)
        return made

    def _of_sums(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        """What a call gives that counts or rows which only data say go into; None for others."""
        if self._written and name != "__setitem__" and name not in _ASKED:
            given = [*args, *kwargs.values()]
            given = [b for a in given for b in (a if isinstance(a, (list, tuple)) else [a])]
            own = {_memory(x) for x, _ in self._written.values()}
            if any(is_tensor(a) and _memory(a) in own for a in given):
                raise of_pieces("a read of a part of what is put together")
        if name == "tolist" and are_counts(args[0]):
            return Counts(args[0], self._sums)
        if name == "__bool__":
            return self._sums.said(args[0])
        if name in ("__getitem__", "__setitem__") and is_tensor(args[0]):
            index = args[1]
            between = self._sums.between(index)
            ends = [index.start, index.stop] if isinstance(index, slice) else []
            if between is None and any(type(i) is DataNumber for i in ends):
                raise of_pieces("a slice")
            if between is not None and name == "__getitem__":
                return ExpertRows(self._cut_of(args[0], between.counts), between.first)
            if between is not None or id(args[0]) in self._written:
                return self._put(args[0], between, args[2])
        return None

    def _cut_of(self, x: Tensor, counts: Tensor) -> Cut:
        key = (id(x), x._version, id(counts))
        return self._cuts.setdefault(key, Cut(x, counts, self._taken_of, short=True))

    def _put(self, x: Tensor, between: Any, value: Any) -> bool:
        """`x[start:end] = piece`: written once all pieces are there."""
        pieces = self._written.setdefault(id(x), (x, []))[1]
        if between is None or type(value) is not ExpertRows or value.number != between.first:
            raise of_pieces("a write of others than the same rows")
        if len(pieces) != between.first or value.counts is not between.counts:
            raise of_pieces("a write in another order")
        self._sums.check_turn(between.first)
        pieces.append(value)
        if len(pieces) == between.counts.shape[0]:
            del self._written[id(x)]
            x.copy_(together(pieces, x))
        return True

    def _settled(self, made: Any) -> Any:
        """The chosen rows, or all rows where the mask is known to leave none out."""
        if self._whole is None or not found_in(made):
            return made
        if isinstance(made, tuple):
            whole = self._whole(made[0].member)
            return tuple(c.full for c in made) if whole else made
        return made.full if self._whole(made.member) else made

    def _begun(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "__getitem__":
            first, *rest = args[1] if isinstance(args[1], tuple) else (args[1],)
            if not is_mask(first) or any(is_mask(i) for i in rest):
                return None
            found = choose(args[0], first, self.key(first))
            full = all(i is Ellipsis or i == slice(None) for i in rest)
            return found if full else applied(func, (found, (slice(None), *rest)), {})
        if name == "masked_select" and len(args) == 2 and not kwargs:
            return self._selected(*args)
        if name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1):
            if not args[0].dim():
                return None
            mask = args[0] if args[0].dtype == torch.bool else args[0] != 0
            found = row_numbers(mask, self.key(args[0]))
            if name == "where" or kwargs.get("as_tuple"):
                return tuple(found)
            stacked = torch.stack([c.full for c in found], -1)
            return found[0].with_rows(stacked, len(found) == 1)
        return None

    def _selected(self, x: Tensor, mask: Tensor) -> MaskedRows:
        """`masked_select`: single numbers, which may be those of whole rows."""
        key, lead = self.key(mask), mask.dim()
        while lead and mask.dim() == x.dim() and mask.shape[lead - 1] == 1:
            lead -= 1
        if 0 < lead < x.dim() and tuple(mask.shape[:lead]) == tuple(x.shape[:lead]):
            rows = choose(x, mask.reshape(mask.shape[:lead]), key)
            each = rows.full[0].numel()
            member = rows.member.unsqueeze(1).expand(-1, each).reshape(-1)
            made = MaskedRows(rows.full.reshape(-1), member, (key, str(each)))
            made.rows = rows
            return made
        if tuple(mask.shape) == tuple(x.shape):
            return choose(x, mask, key)
        x, mask = torch.broadcast_tensors(x, mask)
        return choose(x, mask, (key, str(tuple(x.shape))))

    def key(self, x: Tensor) -> Any:
        """A key that is equal for tensors proved to hold the same numbers, in row-major order."""
        held = self._keys.get(id(x))
        if held is None or held[1] != x._version:
            held = self._keys[id(x)] = (x, x._version, object())
        return held[2]

    def _taken_of(self, x: Any) -> tuple[Tensor, int] | None:
        """The tensor, and the number, by which one was taken of it."""
        held = self._taken.get(id(x))
        return None if held is None or held[3] != x._version else (held[2], held[1])

    def _one_hot(self, x: Any) -> OneHot | None:
        """What a tensor is known to be the one-hot of."""
        held = self._one_hots.get(id(x))
        return None if held is None or held[1] != x._version else held[2]

    def _note(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> None:
        """Notes what a tensor was taken of; for numbers or bools, what it was made of."""
        if self._whole is None:
            self._sums.note(name, args, kwargs, made)
        if name == "__getitem__" and type(args[1]) is int and is_tensor(made) and args[1] >= 0:
            self._taken[id(made)] = (made, args[1], args[0], made._version)
        if not is_tensor(made) or made.is_floating_point() or id(made) in self._keys:
            return
        if args and hasattr(args[0], SAID) and len(args) == 2 and type(args[1]) is int:
            said = OF_COUNTS.get(name.strip("_"), {}).get(args[1])
            if said is not None:
                setattr(made, SAID, said)
        own = getattr(getattr(func, "__self__", None), "__name__", "")
        hot = made_of(own if name == "__get__" else name, args, made, self._one_hot)
        if hot is not None:
            self._one_hots[id(made)] = (made, made._version, hot)
        if name in _SAME and args and is_tensor(args[0]) and args[0].dtype == made.dtype:
            self._keys[id(made)] = (made, made._version, self.key(args[0]))
            return
        if name.startswith(("rand", "empty", "new_empty")) or name in (
            "bernoulli",
            "multinomial",
            "__get__",
        ):
            return
        parts = [self._part(a) for a in (*args, *sorted(kwargs.items()))]
        shapes = [str(tuple(a.shape)) for a in args if is_tensor(a)]
        key = (name, *parts, *(shapes if len(shapes) > 1 or name not in _UNARY else ()))
        self._keys[id(made)] = (made, made._version, key)

    def _note_one(self, made: Tensor, args: tuple[Any, ...]) -> None:
        """Notes what was looked up by the one number of a turn."""
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        own = (("of one", id(p.loop), *p.loop.now) if type(p) is Each else str(p) for p in index)
        self._keys[id(made)] = (made, made._version, (self.key(args[0]), *own))

    def _part(self, x: Any) -> Any:
        if is_tensor(x):
            return self.key(x)
        if isinstance(x, (tuple, list)):
            return tuple(map(self._part, x))
        if x is None or isinstance(x, (bool, int, float, str, torch.dtype)):
            return (type(x).__name__, x)
        return str(x) if isinstance(x, (slice, type(Ellipsis))) else object()


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


_CAT = ("cat", "concat", "concatenate")
_ASKED = ("__get__", "size", "dim", "is_floating_point", "numel")  # which read no number
_SAME = ("view", "reshape", "flatten", "ravel", "contiguous", "squeeze", "unsqueeze", "bool",
         "long", "detach", "clone", "to", "view_as")  # fmt: skip
_UNARY = ("__eq__", "__ne__", "__gt__", "__ge__", "__lt__", "__le__", "eq", "ne", "gt", "ge", "lt",
          "le", "bool", "long", "to", "__invert__", "logical_not", "bitwise_not")  # fmt: skip


__all__ = ["Choosing", "functions", "sums"]
