"""Loops over all experts, as those over the experts that are hit: one turn for all of them.

    for i, expert in enumerate(self.experts):                     # or: for i in range(experts)
        token, place = torch.where(mask[i])
        if token.numel() > 0:
            y.index_add_(0, token, expert(x[token]) * scale[token, place, None])

Python begins such a loop without a call of torch's. So once a function has a mask that is one-hot,
`range` and `enumerate` are replaced in the globals of its module for the rest of the trace. Where
the loop's source lets its number stand for those of all experts (loop_source.py), they give one
turn; everywhere else what they give otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import ModuleList

from onward.capture.expert_loops.batched_turn import Each, Loop
from onward.capture.expert_loops.loop_source import asking_frame, over_all
from onward.capture.expert_loops.module_list import one_of_modules
from onward.model_state.patches import caller, patched

_NAMES = {"range", "enumerate"}


class AllExperts:
    """The loops over all experts of one trace. alone: whether each expert has its own turn, as in
    eager mode. met: whether a function that may have such a loop has run, with `alone` off."""

    def __init__(self, alone: bool) -> None:
        self._alone, self.met = alone, False
        self._replaced, self._modules = ExitStack(), set[int]()

    def watch(self) -> None:
        """Replaces `range` and `enumerate` for the innermost function that runs and calls them."""
        frame = asking_frame()
        while frame is not None and _NAMES.isdisjoint(frame.f_code.co_names):
            frame = frame.f_back
        if self._alone or frame is None or id(frame.f_globals) in self._modules:
            return
        self.met = True
        self._modules.add(id(frame.f_globals))
        places = [(frame.f_globals, "range", _range), (frame.f_globals, "enumerate", _enumerate)]
        self._replaced.enter_context(patched(places))

    def close(self) -> None:
        """Puts back what was replaced."""
        self._replaced.close()


def _range(*args: Any) -> Any:
    numbers = range(*args)
    if len(numbers) < 2 or numbers != range(len(numbers)) or not over_all(caller()):
        return numbers
    return _turns(len(numbers))


def _enumerate(listed: Any, *args: Any, **kwargs: Any) -> Any:
    given = isinstance(listed, ModuleList) and len(listed) > 1 and not (args or kwargs)
    if not given or not over_all(caller()):
        return enumerate(listed, *args, **kwargs)
    return ((number, one_of_modules(listed, number)) for number in _turns(len(listed)))


def _turns(count: int) -> Iterator[Each]:
    return Loop(torch.ones(count, dtype=torch.bool), of_all=True).turns(0)


__all__ = ["AllExperts"]
