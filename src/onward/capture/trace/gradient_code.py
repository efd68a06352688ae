"""Refuses code in a forward that affects its backward (hooks), which an export would drop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.utils.checkpoint import CheckpointFunction

from onward.capture.trace.own_gradients import applied
from onward.errors import CaptureError
from onward.model_state import module_of
from onward.model_state.patches import Patch, patched
from onward.model_state.refusals import NO_HOOKS, keeps_numbers

_Single: Any = torch.autograd.function._SingleLevelFunction
_IN_BACKWARD: dict[tuple[Any, str], str] = {
    (torch.Tensor, "register_hook"): NO_HOOKS,
    (torch.Tensor, "register_post_accumulate_grad_hook"): NO_HOOKS,
    (torch.autograd.graph, "get_gradient_edge"): NO_HOOKS,
    (modules, "BackwardHook"): NO_HOOKS,  # made for a module with backward hooks
    # also called by Tensor.backward
    (torch.autograd, "backward"): (
        "a step differentiates its loss alone; fix: call backward outside of the forward"
    ),
}


@contextmanager
def refusing_gradient_code(trains: bool) -> Iterator[None]:
    """A context in which a forward that registers backward hooks or runs a backward raises
    CaptureError.

    trains: whether gradients are asked for; without them hooks never run, and nothing is refused.
    """
    packing = torch.autograd.graph.saved_tensors_hooks
    places: list[Patch] = []
    if trains:
        places.append((_Single, "apply", classmethod(_apply)))
        places.append((packing, "__enter__", _refuse_pack(packing.__enter__)))
        places += [(*place, _refuse_call(place[1], why)) for place, why in _IN_BACKWARD.items()]
    with patched(places):
        yield


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the base method that `Function.apply` calls, since a user may hold a bound `apply`
    (`f = F.apply`)."""
    if cls is CheckpointFunction:
        return _reentrant(*args)
    if module_of(cls).partition(".")[0] == "torch":  # torch can trace its own functions
        return super(_Single, cls).apply(*args, **kwargs)
    defined = torch.autograd.function._is_setup_context_defined(cls.setup_context)
    lost = "its own backward would be lost; fix: write the gradient with torch ops"
    refuse = _refuse_call("torch.autograd.grad", lost)
    with patched([(torch.autograd, "grad", refuse)]):
        return applied(cls, defined, args)


def _reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """The result of `torch.utils.checkpoint` with `use_reentrant=True`, which has no gradient where
    none of the tensors given requires one. What is computed again is for the plan to say."""
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
        return function(*args)
    with torch.no_grad():
        return function(*args)


def _refuse_pack(pack: Callable[[Any], None]) -> Callable[[Any], None]:
    def refuse(context: Any) -> None:
        if not keeps_numbers(context.pack_hook):
            raise CaptureError(
                "the forward uses torch.autograd.graph.saved_tensors_hooks, which do not run "
                "inside a graph; fix: remove them"
            )
        return pack(context)

    return refuse


def _refuse_call(name: str, why: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CaptureError(f"the forward calls {name}; {why}")

    return refuse


__all__ = ["refusing_gradient_code"]
