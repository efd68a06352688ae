"""The entries of model and optimizer in `Trainer.state_dict`.

A state tensor of the optimizer is saved as `<slot>.<path>`; a slot has no dot in its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onward.distribute import Mesh
from onward.errors import OnwardError
from onward.train.optim import hyperparameters, rules
from onward.train.optimizer_state import ACCUMULATOR, StateKey
from onward.train.parameter_parts import ParameterParts
from onward.train.state_form import found_form, tensors_of
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

# ---- the model


def model_part(
    model: torch.nn.Module, parts: ParameterParts | None = None, to_first: bool = False
) -> StatePart:
    """The model's weights and buffers, by the model's own keys. parts: those of its parameters that
    this rank holds; None: it has all. to_first: of these rank 0 alone saves the whole."""
    held = ParameterParts(Mesh()) if parts is None else parts

    def save() -> dict[str, Any]:
        return {"model": held.state_of(model, to_first)}

    def restore(state: State) -> Callable[[], None]:
        shown = held.shown_state(model)
        hidden = {k for k, v in shown.items() if isinstance(v, torch.Tensor) and held.hides(v)}
        before = {k: copied(v) for k, v in shown.items() if k not in hidden}
        close = held.open(model)

        def back() -> None:
            with torch.no_grad():
                for k, v in model.state_dict().items():
                    if isinstance(v, torch.Tensor) and k not in hidden:
                        v.copy_(before[k])
            close()

        try:
            model.load_state_dict(state["model"])
        except BaseException:  # raised by a hook of the model's
            back()
            raise
        return back

    return StatePart(save, lambda state: _check_model(state, held.shown_state(model)), restore)


def _check_model(state: State, own: Mapping[str, Any]) -> None:
    require(state, "model")
    _check_kind(state, "model", Mapping)
    given = state["model"]
    odd = sorted(map(str, set(given) ^ set(own)))
    if odd:
        raise unfit(f"{', '.join(odd[:4])} of the model: in one of the two only")
    for name, value in own.items():
        if isinstance(value, torch.Tensor):
            check_like(name, given[name], value)
        elif isinstance(given[name], torch.Tensor):
            raise unfit(f"{name} is a tensor")


# ---- the optimizer


def optimizer_part(optimizer: TorchOptimizer, to_first: bool = False) -> StatePart:
    """The optimizer's state and settings, counts of updates, and the summed gradients of an open
    window. It cannot be rolled back, so it has to be the last part restored. to_first: of the
    tensors that are cut over ranks, rank 0 alone saves the whole."""

    def save() -> dict[str, Any]:
        return {
            "optimizer": {_saved_name(k): v for k, v in optimizer.named(to_first).items()},
            "optimizer_class": type(optimizer.torch).__name__,
            "param_groups": [_group(g, optimizer) for g in optimizer.torch.param_groups],
            "updates": optimizer.updates.done,
            "counts": optimizer.named_counts(),
        }

    def restore(state: State) -> Callable[[], None]:
        settings = [
            {k: copied(v) for k, v in given.items() if k != "params"}
            for given in state["param_groups"]
        ]
        tensors = {_key(name): tensor for name, tensor in state["optimizer"].items()}
        optimizer.restore(tensors, state["counts"], state["updates"])
        for group, given in zip(optimizer.torch.param_groups, settings, strict=True):
            group.update(given)
        return lambda: None

    def check(state: State) -> None:
        if "own_state" in state and "param_groups" not in state:
            raise unfit(
                f"{state.get('optimizer_class')} made its updates itself, and here step graphs "
                "make them"
            )
        require(state, "optimizer", "optimizer_class", "param_groups", "updates", "counts")
        _check_kind(state, "optimizer", Mapping)
        _check_kind(state, "counts", Mapping)
        _check_kind(state, "param_groups", Sequence)
        _check_groups(state, optimizer)
        _check_tensors(state, optimizer)
        check_count("updates", state["updates"])

    return StatePart(save, check, restore, optimizer.updates.release)


def _saved_name(key: StateKey) -> str:
    return f"{key.slot}.{key.path}"


def _key(saved_name: Any) -> StateKey:
    slot, _, path = str(saved_name).partition(".")
    return StateKey(path, slot)


def _group(group: Mapping[str, Any], optimizer: TorchOptimizer) -> dict[str, Any]:
    """A param_group, with paths in place of parameters."""
    settings = {k: v for k, v in group.items() if k != "params"}
    return settings | {"params": optimizer.paths(group["params"])}


def _check_kind(state: State, key: str, kind: type) -> None:
    if not isinstance(state[key], kind):
        raise unfit(f"'{key}' is a {type(state[key]).__name__}")


def _check_groups(state: State, optimizer: TorchOptimizer) -> None:
    own_groups, have = optimizer.torch.param_groups, type(optimizer.torch).__name__
    given = state["param_groups"]
    if state["optimizer_class"] != have:
        raise unfit(f"it is a state of {state['optimizer_class']}, the optimizer is {have}")
    if len(given) != len(own_groups):
        raise unfit(f"it has {len(given)} param_groups, the optimizer {len(own_groups)}")
    for i, (group, own) in enumerate(zip(given, own_groups, strict=True)):
        if not isinstance(group, Mapping):
            raise unfit(f"param_groups[{i}] is a {type(group).__name__}")
        if group.get("params") != optimizer.paths(own["params"]):
            raise unfit(f"param_groups[{i}] holds other parameters")
    for i in range(len(given)):
        try:
            hyperparameters(optimizer.torch, given[i])
            rules(optimizer.torch, [given[i]])
            missing = [k for k in optimizer.torch.defaults if k not in given[i]]
        except (KeyError, TypeError, ValueError) as error:
            raise unfit(f"param_groups[{i}]: {error!r}") from None
        if missing:
            raise unfit(f"param_groups[{i}] lacks '{missing[0]}'")
    try:
        optimizer.check_groups(given)
    except OnwardError as error:
        raise unfit(f"{error}") from None


def _check_tensors(state: State, optimizer: TorchOptimizer) -> None:
    """Checks that state tensors in any form, accumulators and counts fit the model and one
    another."""
    parameters, record = dict(optimizer.model.named_parameters()), optimizer.record
    given, counts = state["optimizer"], state["counts"]
    groups = {path: group for group in state["param_groups"] for path in group["params"]}
    held: dict[str, dict[str, Any]] = {}
    for name, tensor in given.items():
        path, slot = _key(name)
        held.setdefault(path, {})[slot] = tensor
    like: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensors in held.items():
        if path in parameters:
            p = parameters[path]
            form = found_form(record, tensors, p)
            sums = optimizer.updates.state.like_of_sums(p)
            like[path] = {**tensors_of(record, form, p), ACCUMULATOR: sums}
    for name, tensor in given.items():
        path, slot = _key(name)
        if slot not in like.get(path, ()):
            raise unfit(f"nothing here is called {name}")
        if slot != ACCUMULATOR and path not in counts:
            raise unfit(f"'counts' lacks {path}, which has {slot}")
        if slot == ACCUMULATOR and not state["micro_steps"]:
            raise unfit(f"{name}, but no window is open")
        check_like(str(name), tensor, like[path][slot])
    if state["updates"] and not counts and _keeps_state(state, optimizer):
        raise unfit(
            f"it has {state['updates']} updates and none of the optimizer's state, as where "
            "torch.distributed.checkpoint has filled that of a new Trainer; fix: have it fill "
            "onward.checkpoint.empty_state(folder)"
        )
    for path, count in counts.items():
        if path not in parameters:
            raise unfit(f"no parameter here is called {path}")
        check_count(f"counts[{path!r}]", count)
        slots = like.get(path) or tensors_of(record, "", parameters[path])
        kept = [s for s in slots if s not in record.slots or record.kept(groups.get(path, {}), s)]
        needed = [_saved_name(StateKey(path, slot)) for slot in kept if slot != ACCUMULATOR]
        lacking = [name for name in needed if name not in given]
        if lacking:
            raise unfit(f"{lacking[0]} is missing")
    if state["micro_steps"] and not any(_key(name).slot == ACCUMULATOR for name in given):
        raise unfit("it was saved in the middle of gradient accumulation, without its gradients")


def _keeps_state(state: State, optimizer: TorchOptimizer) -> bool:
    """Whether the optimizer of a state keeps tensors for the parameters that it updates."""
    record, groups = optimizer.record, [group for group in state["param_groups"] if group["params"]]
    return any(record.kept(group, slot) for group in groups for slot in record.slots)


__all__ = ["model_part", "optimizer_part"]
