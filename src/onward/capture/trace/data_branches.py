"""Choices of the forward by the batch's numbers, `if mask.any():`, answered as in a first run.

A graph has one of both sides. The first run, in eager mode, says which; the export takes the same
side, and returns what was asked (a tensor of one bool), which is a guard on later batches
(batch_guards/pinned.py).

Whole numbers that a forward reads into Python (`grid.tolist()`, `range(n)`) are pinned likewise
where a graph has no other form of it (`values`), and masks that leave no row out, `h[mask]`.
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

_MOST = 64  # questions of one forward
_MOST_VALUES = 256  # where numbers are asked too
_LONGEST = 4096  # a tensor whose numbers are asked
_FRAMES = 4  # innermost ones that say where a question comes from

Answer: TypeAlias = tuple[Any, Any]  # where it was asked, and what was said

_READ: dict[Any, Any] = {
    torch.Tensor.tolist: None, torch.Tensor.item: None, torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
}  # fmt: skip
# Functions that read a size or a place, for which a tensor of one number may be given.
_SIZED = (
    "arange", "expand", "empty", "full", "linspace", "narrow", "new_empty", "new_full", "new_ones",
    "new_zeros", "ones", "permute", "repeat", "reshape", "split", "tensor_split", "unflatten",
    "view", "zeros", "pad", "roll", "interpolate", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
)  # fmt: skip


class Unasked(CaptureError):
    """The traced forward asks a question that the run before did not hear."""


class Asked(TorchFunctionMode):
    """Within it, answers to `bool(tensor)`, and to `torch.equal`, are those given, in order; or,
    without any, the tensor's own, and noted.

    A forward may ask more in eager mode than while it is traced: an answer is for the next question
    from its own place.

    values: whether numbers that are read into Python are answered so too. questions: the tensors
    that were asked. answers: what was said. masks: of each mask that chooses rows, whether it
    chooses all. read: how many of the questions are there for `values` alone.
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
            # a question may follow from the batch though the other's numbers do not
            return args[0].expand(args[1].shape)
        if self.values:
            if func in _READ and _whole_numbers(args[0]):
                x = args[0] if func is torch.Tensor.tolist else args[0].reshape(())
                with contextlib.suppress(Unasked):  # where only a trace asks
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
        """The arguments, with numbers in place of tensors where a size or a place is read."""
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
        """Whether a mask chooses every row; what is not so is no matter of this batch alone, and
        no question."""
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
        # a copy, since what is written later is no matter of this question
        self.questions.append(question.detach().clone())


_tolist: Any = FakeTensor.tolist


def _as_a_tensor(x: Any) -> Any:
    """`tolist` of a trace's tensor, of which a mode hears."""
    return torch.Tensor.tolist(x)


def _of_traces(x: Any) -> Any:
    return _tolist(x) if isinstance(x, FakeTensor) else x.tolist()


_MAKING = ("arange", "empty", "full", "linspace", "ones", "zeros")


def _taken(answers: list[Answer], place: Any) -> Any:
    """The next answer from this place, those before it left behind; None where there is none."""
    for i, (where, said) in enumerate(answers):
        if where == place:
            del answers[: i + 1]
            return said
    return None


def said(question: torch.Tensor, kind: Any) -> Any:
    return bool(question) if kind is bool else question.tolist()


def _repeated(
    counts: list[int], x: torch.Tensor, repeats: Any, dim: int | None = None, **_: Any
) -> torch.Tensor:
    """`repeat_interleave` of `counts[i]` times each, with counts as numbers."""
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
    """The lines of the model's code where a question is asked."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < _FRAMES:
        name = frame.f_globals.get("__name__", "")
        if name == "onward.capture.trace.flat_call":  # which calls the model
            break
        if name != "torch" and not name.startswith(
            ("onward.capture.", "onward.model_state.", "torch.")
        ):  # whose own calls a trace may replace
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


__all__ = ["Answer", "Asked", "Unasked", "said"]
