"""The entries of `Trainer.state_dict` of an optimizer that makes its updates itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onward.train.held_optimizer import HeldOptimizer
from onward.train.optimizer_state import ACCUMULATOR
from onward.train.own_step import OwnStep
from onward.train.state import optimizer_part
from onward.train.state_part import (
    State,
    StatePart,
    check_count,
    check_like,
    copied,
    require,
    unfit,
)
from onward.train.torch_optimizer import TorchOptimizer

_SUM = f"{ACCUMULATOR}."  # begins the names of the sums of an open window, as in `state.py`


def part_of(optimizer: HeldOptimizer[Any], to_first: bool = False) -> StatePart:
    """The entries of a Trainer's optimizer, whoever makes its updates. to_first: see
    `optimizer_part`."""
    if isinstance(optimizer, TorchOptimizer):
        return optimizer_part(optimizer, to_first)
    assert isinstance(optimizer, OwnStep), "there are two kinds"
    return own_part(optimizer)


def own_part(optimizer: OwnStep) -> StatePart:
    """`own_state`, the optimizer's own `state_dict`; the paths of its parameters, by group; the
    number of updates; the summed gradients of an open window. It has to be the last part restored,
    since the code of `load_state_dict` is the user's."""
    updates = optimizer.updates

    def save() -> dict[str, Any]:
        sums = updates.summed().items()
        return {
            "optimizer": {f"{_SUM}{updates.names[p]}": t.to(p.dtype) for p, t in sums},
            "optimizer_class": type(optimizer.torch).__name__,
            "own_state": optimizer.torch.state_dict(),
            "parameters": _paths(optimizer),
            "updates": updates.done,
        }

    def restore(state: State) -> Callable[[], None]:
        before = copied(optimizer.torch.state_dict())
        optimizer.is_half_restored = True  # until all of the Trainer's state is restored
        try:
            optimizer.torch.load_state_dict(copied(state["own_state"]))
        except BaseException:
            optimizer.torch.load_state_dict(before)
            optimizer.is_half_restored = False
            raise
        parameters = dict(optimizer.model.named_parameters())
        updates.restore_sums(parameters, _sums(state), state["updates"])
        return lambda: None

    return StatePart(save, lambda state: _check(state, optimizer), restore)


def _paths(optimizer: OwnStep) -> list[list[str]]:
    return [optimizer.paths(group["params"]) for group in optimizer.torch.param_groups]


def _sums(state: State) -> dict[str, Any]:
    """The summed gradients in a state, by the parameter's path."""
    return {str(name).removeprefix(_SUM): tensor for name, tensor in state["optimizer"].items()}


def _check(state: State, optimizer: OwnStep) -> None:
    have = type(optimizer.torch).__name__
    if "own_state" not in state and "param_groups" in state:
        raise unfit(
            f"its updates were made by step graphs, and here {have} makes them itself "
            f"({optimizer.why})"
        )
    require(state, "optimizer", "optimizer_class", "own_state", "parameters", "updates")
    for key in ("optimizer", "own_state"):
        if not isinstance(state[key], Mapping):
            raise unfit(f"'{key}' is a {type(state[key]).__name__}")
    if state["optimizer_class"] != have:
        raise unfit(f"it is a state of {state['optimizer_class']}, the optimizer is {have}")
    if state["parameters"] != _paths(optimizer):
        raise unfit("its optimizer holds other parameters, or in other groups")
    check_count("updates", state["updates"])
    parameters = dict(optimizer.model.named_parameters())
    for name, tensor in state["optimizer"].items():
        path = str(name).removeprefix(_SUM)
        if not str(name).startswith(_SUM) or path not in parameters:
            raise unfit(f"nothing here is called {name}")
        if not state["micro_steps"]:
            raise unfit(f"{name}, but no window is open")
        check_like(str(name), tensor, parameters[path])
    if state["micro_steps"] and not state["optimizer"]:
        raise unfit("it was saved in the middle of gradient accumulation, without its gradients")


__all__ = ["own_part", "part_of"]
