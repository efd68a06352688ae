"""Row choices: turns an index by a boolean mask in the forward's code into `MaskedRows`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onward.capture.expert_loops import NOT_ASKED, ExpertLoops
from onward.capture.masked_rows import functions
from onward.capture.masked_rows import reductions as sums
from onward.capture.masked_rows.functions import put_back
from onward.capture.masked_rows.rows import (
    MaskedRows,
    applied,
    choose,
    found_in,
    is_mask,
    is_tensor,
    row_numbers,
)
from onward.errors import CaptureError
from onward.model_state.patches import patched

Tensor = torch.Tensor
_PLAIN_L1: Any = torch.nn.functional.l1_loss


def _of_rows(function: Any) -> Any:
    """Returns a replacement for a function (`torch.pow`) whose argument parser crashes the process
    where the first argument is no tensor and the second is a number."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if found_in((args, kwargs)):
            return applied(function, args, kwargs)
        return function(*args, **kwargs)

    return called


def _l1_loss(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
) -> Any:
    """`torch.nn.functional.l1_loss`, which forgets its weight under a function mode."""
    if weight is None:
        return _PLAIN_L1(input, target, size_average, reduce, reduction)
    if size_average is not None or reduce is not None:
        raise CaptureError("l1_loss with size_average or reduce; fix: give reduction")
    each = (input - target).abs() * weight
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.sum() / weight.sum()


def _forgets_a_weight() -> bool:
    """Whether an l1_loss that is being called was given a weight, as where its module was imported
    by `from torch.nn.functional import l1_loss`."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _PLAIN_L1.__code__ and frame.f_locals.get("weight") is not None:
            return True
        frame = frame.f_back
    return False


class Choosing(TorchFunctionMode):
    """A mode in which an index by a boolean mask returns a `MaskedRows`, or all rows where `whole`
    returns true for the mask. alone: whether each expert has a turn in a loop over all experts."""

    def __init__(self, whole: Callable[[Tensor], bool] | None = None, alone: bool = False) -> None:
        super().__init__()
        self._whole = whole
        self._keys: dict[int, tuple[Tensor, int, Any]] = {}
        self._loops = ExpertLoops(whole is None, alone, self._note_derived)

    def __enter__(self) -> Any:
        places: list[Any] = [
            (torch, f.__name__, _of_rows(f)) for f in (torch.pow, torch.float_power)
        ]
        places.append((torch.nn.functional, "l1_loss", _l1_loss))
        self._patches = patched([*places, *self._loops.places()])
        self._patches.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._loops.all.close()
        self._patches.__exit__(*error)

    @property
    def over_all(self) -> bool:
        """Whether a function that may loop over all experts has run, with `alone` off."""
        return self._loops.all.met

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in ("l1_loss", "_l1_loss") and _forgets_a_weight():
            raise CaptureError(
                "l1_loss of a function mode forgets its weight; fix: write "
                "torch.nn.functional.l1_loss, or the product of the differences and the weight"
            )
        answered = self._loops.answer(func, args, kwargs)
        if answered is not NOT_ASKED:
            return answered
        if name == "__setitem__" and isinstance(args[2], MaskedRows) and is_mask(args[1]):
            return put_back(args[0], args[1], self.key(args[1]), args[2])
        if found_in((args, kwargs)):
            return applied(func, args, kwargs)
        made = self._settled(self._begun(func, name, args, kwargs))
        if made is None:
            made = func(*args, **kwargs)
            self._loops.note(func, args, kwargs, made)
            self._note(name, args, kwargs, made)
        return made

    def _settled(self, made: Any) -> Any:
        """Returns the masked rows, or all rows where the mask is known to choose every row."""
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
        """Returns `masked_select(x, mask)`: single elements, or whole rows flattened."""
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
        """Returns a key that is equal only for tensors proved to have the same numbers in row-major
        order."""
        held = self._keys.get(id(x))
        if held is None or held[1] != x._version:
            held = self._keys[id(x)] = (x, x._version, object())
        return held[2]

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        """Remembers how a tensor of integers or bools was computed, as its key."""
        if not is_tensor(made) or made.is_floating_point() or id(made) in self._keys:
            return
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

    def _note_derived(self, made: Tensor, source: Tensor, places: Any) -> None:
        """Remembers that `made` was read from `source` at these places, as its key."""
        self._keys[id(made)] = (made, made._version, (self.key(source), *places))

    def _part(self, x: Any) -> Any:
        if is_tensor(x):
            return self.key(x)
        if isinstance(x, (tuple, list)):
            return tuple(map(self._part, x))
        if x is None or isinstance(x, (bool, int, float, str, torch.dtype)):
            return (type(x).__name__, x)
        return str(x) if isinstance(x, (slice, type(Ellipsis))) else object()


_SAME = ("view", "reshape", "flatten", "ravel", "contiguous", "squeeze", "unsqueeze", "bool",
         "long", "detach", "clone", "to", "view_as")  # fmt: skip
_UNARY = ("__eq__", "__ne__", "__gt__", "__ge__", "__lt__", "__le__", "eq", "ne", "gt", "ge", "lt",
          "le", "bool", "long", "to", "__invert__", "logical_not", "bitwise_not")  # fmt: skip


__all__ = ["Choosing", "functions", "sums"]
