"""Data branches (`if mask.any():`): the trace takes the side that a first eager run has taken.

A graph holds one side of a branch. A first run in eager mode records the answer, the export is
given the same one, and returns the question (a tensor with one bool) as an output, from which a
guard on later batches is made (batch_guards/pinned.py).

Integers that a forward reads into Python (`grid.tolist()`, `range(n)`), and masks that choose every
row (`h[mask]`), are pinned in the same way if `values` is set, for models that have no other form
as a graph.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from onward.errors import CaptureError
from onward.model_state.patches import patched

_MOST = 64  # questions of one forward at most
_MOST_VALUES = 256  # at most if `values` is set
_LONGEST = 4096  # elements of a tensor that may be read into Python
_FRAMES = 4  # innermost stack frames that identify a question

Answer: TypeAlias = tuple[Any, Any]  # the place of the question, and its answer

_READ: dict[Any, Any] = {
    torch.Tensor.tolist: None, torch.Tensor.item: None, torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
}  # fmt: skip
# functions that read a number off a tensor into Python
_OF_NUMBERS = {*_READ, torch.Tensor.__float__, torch.Tensor.__complex__}
# functions with arguments that are sizes or dims, for which a model may pass a 0-dim tensor
_SIZED = (
    "arange", "expand", "empty", "full", "linspace", "narrow", "new_empty", "new_full", "new_ones",
    "new_zeros", "ones", "permute", "repeat", "reshape", "split", "tensor_split", "unflatten",
    "view", "zeros", "pad", "roll", "interpolate", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
)  # fmt: skip


class Unasked(CaptureError):
    """The traced forward asks a question that the first run has no answer to."""


class Asked(TorchFunctionMode):
    """A mode that answers `bool(tensor)` and `torch.equal`: with the recorded `answers` in order,
    or, if `answers` is None, truthfully; and records questions and answers.

    A forward may ask more in eager mode than in a trace, so an answer serves the next question from
    the same place. Raises Unasked where there is none, and CaptureError for too many questions.

    values: whether integers read into Python are answered too. questions: the tensors asked about.
    answers: the answers given. masks: for each mask that chooses rows, whether it chooses all.
    read: how many questions are asked because of `values` alone. outer: the tensors from outside of
    the trace, which no module registers, that a traced forward reads a number off.
    """

    def __init__(
        self,
        answers: Sequence[Answer] | None = None,
        masks: Sequence[Answer] = (),
        values: bool = False,
    ) -> None:
        super().__init__()
        self.given = None if answers is None else list(answers)
        self.given_masks, self.values = list(masks), values
        self.questions: list[torch.Tensor] = []
        self.answers: list[Answer] = []
        self.masks: list[Answer] = []
        self.read = 0
        self.outer: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.equal, torch.Tensor.equal):
            one, other = args
            if one.shape != other.shape:
                return False
            return self._answer((one == other).all(), bool)
        if func is torch.Tensor.__bool__:
            return self._answer(args[0], bool)
        if func is torch.Tensor.expand_as and isinstance(args[1], torch.Tensor):
            # by shape alone, since the batch may not decide the numbers of `args[1]`
            return args[0].expand(args[1].shape)
        if func in _OF_NUMBERS and not isinstance(args[0], FakeTensor):
            self.outer[id(args[0])] = args[0]
        if self.values:
            if func in _READ and _whole_numbers(args[0]):
                x = args[0] if func is torch.Tensor.tolist else args[0].reshape(())
                with contextlib.suppress(Unasked):  # a read that only the trace makes
                    return self._answer(x, _READ[func])
                func = _of_traces if func is torch.Tensor.tolist else func
            name = getattr(func, "__name__", "")
            repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
            if name == "repeat_interleave" and _whole_numbers(repeats) and repeats.dim():
                with contextlib.suppress(Unasked):
                    return _repeated(self._answer(repeats, None), *args, **kwargs)
            args, kwargs = self._numbers(name, args, kwargs)
        return func(*args, **kwargs)

    def __enter__(self) -> Any:
        self._patches = patched([(FakeTensor, "tolist", _as_a_tensor)] if self.values else [])
        self._patches.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.__exit__(*error)

    def _numbers(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments, with integers in place of tensors that are sizes or dims."""
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, slice) and _has_tensor(i) for i in index):
                made = tuple(
                    slice(*map(self._number, (i.start, i.stop, i.step)))
                    if isinstance(i, slice)
                    else i
                    for i in index
                )
                return (args[0], made), kwargs
        elif name in _SIZED:
            first = args[:1] if name not in _MAKING else ()
            return (
                (*first, *map(self._number, args[len(first) :])),
                {k: self._number(v) for k, v in kwargs.items()},
            )
        return args, kwargs

    def _number(self, x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(map(self._number, x)) if type(x) in (tuple, list) else x
        if not _whole_numbers(x) or x.dim():
            return x
        with contextlib.suppress(Unasked):
            x = self._answer(x, None)
        return x

    def whole(self, mask: torch.Tensor) -> bool:
        """Returns whether a mask chooses every row. Only a yes is pinned as a question: a mask that
        leaves rows out is captured for any batch."""
        place = _place()
        first = self.given is None
        said = bool(mask.all()) if first else bool(_taken(self.given_masks, place))
        self.masks.append((place, said))
        if said:
            self.read += 1
            self._note(place, mask.all(), True)
        return said

    def _answer(self, question: torch.Tensor, kind: Any) -> Any:
        place = _place()
        if self.given is None:
            answer = said(question, kind)
        else:
            answer = _taken(self.given, place)
            if answer is None:
                raise Unasked("the forward asks a tensor")
        self.read += kind is not bool
        self._note(place, question, answer)
        return answer if kind is None else kind(answer)

    def _note(self, place: Any, question: torch.Tensor, answer: Any) -> None:
        most = _MOST_VALUES if self.values else _MOST
        if len(self.answers) >= most:
            raise CaptureError(
                f"the forward asks more than {most} tensors for their truth, such as in a loop; "
                "fix: compute with the tensors instead of choosing by them"
            )
        self.answers.append((place, answer))
        # a copy, since the forward may write into it later
        self.questions.append(question.detach().clone())


_tolist: Any = FakeTensor.tolist


def _as_a_tensor(x: Any) -> Any:
    """Replaces `FakeTensor.tolist` by one that the mode sees."""
    return torch.Tensor.tolist(x)


def _of_traces(x: Any) -> Any:
    return _tolist(x) if isinstance(x, FakeTensor) else x.tolist()


_MAKING = ("arange", "empty", "full", "linspace", "ones", "zeros")


def _taken(answers: list[Answer], place: Any) -> Any:
    """Returns the next answer from this place, and removes it and those before it; None where there
    is none."""
    for i, (where, said) in enumerate(answers):
        if where == place:
            del answers[: i + 1]
            return said
    return None


def said(question: torch.Tensor, kind: Any) -> Any:
    """Returns a question's answer: a bool if `kind` is bool, else the numbers as a list."""
    return bool(question) if kind is bool else question.tolist()


def _repeated(
    counts: list[int], x: torch.Tensor, repeats: Any, dim: int | None = None, **_: Any
) -> torch.Tensor:
    """`repeat_interleave` with the repeats as Python integers: element i `counts[i]` times."""
    x, dim = (x.flatten(), 0) if dim is None else (x, dim)
    counts = counts * x.shape[dim] if len(counts) == 1 else counts
    places = [i for i, n in enumerate(counts) for _ in range(n)]
    return x.index_select(dim, torch.tensor(places, dtype=torch.int64, device=x.device))


def _whole_numbers(x: Any) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and not (x.is_floating_point() or x.is_complex())
        and x.numel() <= _LONGEST
    )


def _has_tensor(index: slice) -> bool:
    return any(isinstance(n, torch.Tensor) for n in (index.start, index.stop, index.step))


def _place() -> Any:
    """Returns the innermost lines of the model's code from which a question is asked."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < _FRAMES:
        name = frame.f_globals.get("__name__", "")
        if name == "onward.capture.trace.flat_call":  # this module calls the model
            break
        if name != "torch" and not name.startswith(
            ("onward.capture.", "onward.model_state.", "torch.")
        ):  # frames of these differ between a trace and an eager run
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


__all__ = ["Answer", "Asked", "Unasked", "said"]
