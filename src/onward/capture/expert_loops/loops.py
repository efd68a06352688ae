"""ExpertLoops: what a trace asks of this room, call by call.

The mode of a trace (`trace/row_choices.py`) hears every function of torch's. It hands each call to
`answer` first, and tells `note` what the calls that were nobody's have made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from onward.capture.expert_loops.all_experts import AllExperts
from onward.capture.expert_loops.batched_turn import (
    OF_COUNTS,
    Each,
    Loop,
    each_in,
    looked_up,
    may_change,
    of_each,
    of_loop,
)
from onward.capture.expert_loops.counts import Counts, DataNumber, Sums, are_counts, of_pieces
from onward.capture.expert_loops.loop_source import asking_frame, skips_nothing
from onward.capture.expert_loops.module_list import one_of_modules
from onward.capture.expert_loops.one_hot import OneHot, made_of
from onward.capture.expert_loops.split_rows import Cut, ExpertRows, cut, done, pieces_in, together
from onward.capture.masked_rows.rows import RUNNING, SAID, found_in, is_tensor

Tensor = torch.Tensor
NOT_ASKED: Any = object()  # the answer to a call that no loop over experts makes


class ExpertLoops:
    """What one trace knows of its loops over experts.

    counted: whether numbers that only data say are followed too. alone: whether each expert has a
    turn in a loop over all of them. derived: is told of a tensor that was looked up for the one
    expert of a turn, what it was taken of, and where.
    """

    def __init__(
        self, counted: bool, alone: bool, derived: Callable[[Tensor, Tensor, Any], None]
    ) -> None:
        self._counted, self._derived = counted, derived
        self.all = AllExperts(alone)
        self._one_hots: dict[int, tuple[Tensor, int, OneHot]] = {}
        self._taken: dict[int, tuple[Tensor, int, Tensor, int]] = {}
        self._sums = Sums()
        self._cuts: dict[tuple[int, int, int], Cut] = {}
        self._written: dict[int, tuple[Tensor, list[ExpertRows]]] = {}  # in part, by pieces

    def places(self) -> list[tuple[Any, str, Any]]:
        """Functions to be replaced during the trace: owner, name, what stands there."""
        found: list[tuple[Any, str, Any]] = [(torch.nn.ModuleList, "__getitem__", one_of_modules)]
        if self._counted:
            found.append((FakeTensor, "tolist", _as_a_tensor))
        return found

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call gives within a loop over experts; `NOT_ASKED` where it is none of a loop's.

        Raises CaptureError where a turn may do what eager does not.
        """
        name = getattr(func, "__name__", "")
        if not may_change(name, args, kwargs):
            raise of_loop(f"{name} of what is no expert's")
        if RUNNING and isinstance(RUNNING[-1], Loop):
            RUNNING[-1].heed(name, func, args, kwargs)
        if each_in((args, kwargs)):
            return self._of_experts(func, name, args, kwargs)
        if name == "__bool__" and hasattr(args[0], SAID) and skips_nothing(asking_frame()):
            return getattr(args[0], SAID)
        if found_in((args, kwargs)):
            return NOT_ASKED
        if self._counted:
            found = self._of_sums(name, args, kwargs)
            if found is not None:
                return found
            if name == "tolist" and isinstance(args[0], FakeTensor):
                return _tolist(args[0])
        if name in ("split", "split_with_sizes") and any(
            type(a) is Counts for a in (*args, *kwargs.values())
        ):
            return cut(args, kwargs, self._taken_of)
        asked = name in _CAT and self._sums.check(args, kwargs)
        if asked or pieces_in((args, kwargs)):
            return done(func, args, kwargs)
        return NOT_ASKED

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Remembers what a tensor was taken of; of integers and bools, what they were made of."""
        name = getattr(func, "__name__", "")
        if self._counted:
            self._sums.note(name, args, kwargs, made)
        if name == "__getitem__" and type(args[1]) is int and is_tensor(made) and args[1] >= 0:
            self._taken[id(made)] = (made, args[1], args[0], made._version)
        if not is_tensor(made) or made.is_floating_point():
            return
        if args and hasattr(args[0], SAID) and len(args) == 2 and type(args[1]) is int:
            said = OF_COUNTS.get(name.strip("_"), {}).get(args[1])
            if said is not None:
                setattr(made, SAID, said)
        hot = made_of(name, args, made, self._one_hot)
        if hot is not None:
            self._one_hots[id(made)] = (made, made._version, hot)
            self.all.watch()

    # ---- what a turn for several experts looks up

    def _of_experts(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == "__getitem__" and is_tensor(args[0]) and type(args[1]) is Each:
            return looked_up(args[0], args[1], self._one_hot(args[0]))
        of_one = of_each(func, args, kwargs)
        if is_tensor(of_one):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            places = (
                ("of one", id(p.loop), *p.loop.now) if type(p) is Each else str(p) for p in index
            )
            self._derived(of_one, args[0], tuple(places))
        return of_one

    def _one_hot(self, x: Any) -> OneHot | None:
        """What a tensor is known to be the one-hot of."""
        held = self._one_hots.get(id(x))
        return None if held is None or held[1] != x._version else held[2]

    # ---- rows that are cut by counts

    def _of_sums(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counts that only data say, and rows that are cut by them; None for others."""
        if self._written and name != "__setitem__" and name not in _ASKED:
            given = [*args, *kwargs.values()]
            given = [b for a in given for b in (a if isinstance(a, (list, tuple)) else [a])]
            own = {_memory(x) for x, _ in self._written.values()}
            if any(is_tensor(a) and _memory(a) in own for a in given):
                raise of_pieces("a read of a part of what is put together")
        if name == "tolist" and are_counts(args[0]):
            return Counts(args[0])
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
        self._sums.check_turn()
        pieces.append(value)
        if len(pieces) == between.counts.shape[0]:
            del self._written[id(x)]
            x.copy_(together(pieces, x))
        return True

    def _taken_of(self, x: Any) -> tuple[Tensor, int] | None:
        """The tensor, and the number, by which one was taken of it."""
        held = self._taken.get(id(x))
        return None if held is None or held[3] != x._version else (held[2], held[1])


_tolist: Any = FakeTensor.tolist


def _as_a_tensor(x: Any) -> Any:
    """`tolist` of a trace's tensor, which a mode hears of."""
    return Tensor.tolist(x)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


_CAT = ("cat", "concat", "concatenate")
_ASKED = ("__get__", "size", "dim", "is_floating_point", "numel")  # which read no number


__all__ = ["NOT_ASKED", "ExpertLoops"]
