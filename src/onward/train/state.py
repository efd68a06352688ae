"""`Trainer.state_dict` of model and optimizer: saved, checked, restored.

Everything is checked before the first write, so that a state that does not fit changes nothing.
A state tensor of the optimizer is saved as `<slot>.<path>`, a slot being a word without a dot.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onward.config import OnwardError
from onward.graph.ops.optimizers import Optimizer as Record
from onward.prepare.seed_stream import WORD
from onward.train.optim import hyperparameters
from onward.train.optimizer_state import ACCUMULATOR, StateKey
from onward.train.state_form import found_form, tensors_of
from onward.train.updates import Updates

KEYS = (
    "model", "optimizer", "optimizer_class", "param_groups", "updates", "counts",
    "gradient_accumulation_steps", "micro_steps", "samples", "seed", "generator",
)  # fmt: skip


def saved(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, updates: Updates, window: bool
) -> dict[str, Any]:
    """Copies of weights, buffers, the optimizer's state and settings. With `window`, of the
    gradients accumulated so far too."""
    return {
        "model": {k: _copied(v) for k, v in model.state_dict().items()},
        "optimizer": {_saved_name(k): v.clone() for k, v in updates.named(window).items()},
        "optimizer_class": type(optimizer).__name__,
        "param_groups": [_group(g, updates) for g in optimizer.param_groups],
        "updates": updates.done,
        "counts": updates.named_counts(),
    }


def restore(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    updates: Updates,
) -> None:
    """Writes a state that was checked."""
    before = {k: _copied(v) for k, v in model.state_dict().items()}
    try:
        model.load_state_dict(state["model"])
    except BaseException:  # a hook of the model's own
        with torch.no_grad():
            for k, v in model.state_dict().items():
                if isinstance(v, torch.Tensor):
                    v.copy_(before[k])
        raise
    for group, given in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({k: _copied(v) for k, v in given.items() if k != "params"})
    tensors = {_key(name): tensor for name, tensor in state["optimizer"].items()}
    updates.restore(tensors, state["counts"], state["updates"])


def check_state(
    state: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    updates: Updates,
    steps: int,
) -> None:
    """Raises OnwardError where `restore` would not give back what was saved. `steps`: micro-batches
    per update."""
    if not isinstance(state, Mapping):
        raise _error(f"it is a {type(state).__name__}, not a dict")
    missing = [k for k in KEYS if k not in state]
    if missing:
        raise _error(f"'{missing[0]}' is missing")
    for key, kind in (("model", Mapping), ("optimizer", Mapping), ("counts", Mapping),
                      ("param_groups", Sequence)):  # fmt: skip
        if not isinstance(state[key], kind):
            raise _error(f"'{key}' is a {type(state[key]).__name__}, which is not its type")
    _check_model(state["model"], model.state_dict())
    _check_groups(state, optimizer, updates)
    _check_tensors(state, dict(model.named_parameters()), updates.record)
    _check_counters(state, steps)
    _check_random(state)


def _saved_name(key: StateKey) -> str:
    return f"{key.slot}.{key.path}"


def _key(saved_name: Any) -> StateKey:
    slot, _, path = str(saved_name).partition(".")
    return StateKey(path, slot)


def _error(what: str) -> OnwardError:
    return OnwardError(f"the state_dict does not fit this Trainer: {what}; nothing was loaded")


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _group(group: Mapping[str, Any], updates: Updates) -> dict[str, Any]:
    """A param_group, its parameters by their paths."""
    settings = {k: _copied(v) for k, v in group.items() if k != "params"}
    return settings | {"params": updates.paths_of(group["params"])}


def _check_model(given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    odd = sorted(map(str, set(given) ^ set(own)))
    if odd:
        raise _error(
            f"{', '.join(odd[:4])} is either in the saved model or in this one, but not in both"
        )
    for name, value in own.items():
        if isinstance(value, torch.Tensor):
            _check_like(name, given[name], value)
        elif isinstance(given[name], torch.Tensor):
            raise _error(f"{name} is a tensor there, and not one in this model")


def _check_like(name: str, given: Any, own: torch.Tensor) -> None:
    if not isinstance(given, torch.Tensor):
        raise _error(f"{name} is a {type(given).__name__}, not a tensor")
    if given.is_meta or given.layout != own.layout:
        raise _error(f"{name} is on the meta device, or of another layout")
    if given.shape != own.shape or given.dtype != own.dtype:
        raise _error(
            f"{name} is {given.dtype} {list(given.shape)}, but {own.dtype} {list(own.shape)} here"
        )


def _check_groups(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, updates: Updates
) -> None:
    have, given = type(optimizer).__name__, state["param_groups"]
    if state["optimizer_class"] != have:
        raise _error(f"it was saved with {state['optimizer_class']}, but the optimizer is {have}")
    if len(given) != len(optimizer.param_groups):
        raise _error(
            f"it has {len(given)} param_groups, but the optimizer has {len(optimizer.param_groups)}"
        )
    for i, (group, own) in enumerate(zip(given, optimizer.param_groups, strict=True)):
        if not isinstance(group, Mapping):
            raise _error(f"param_groups[{i}] is a {type(group).__name__}, not a dict")
        if group.get("params") != updates.paths_of(own["params"]):
            raise _error(f"param_groups[{i}] holds other parameters")
    for i in range(len(given)):
        try:
            hyperparameters(optimizer, given[i])
            missing = [k for k in optimizer.defaults if k not in given[i]]
        except (KeyError, TypeError, ValueError) as error:
            raise _error(f"param_groups[{i}]: {error!r}") from None
        if missing:
            raise _error(f"param_groups[{i}] lacks '{missing[0]}'")


def _check_tensors(
    state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor], record: Record
) -> None:
    """State tensors in any form, accumulators and counts, with one another."""
    given, counts = state["optimizer"], state["counts"]
    held: dict[str, dict[str, Any]] = {}
    for name, tensor in given.items():
        path, slot = _key(name)
        held.setdefault(path, {})[slot] = tensor
    like: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensors in held.items():
        if path in parameters:
            p = parameters[path]
            form = found_form(record, tensors, p)
            like[path] = {**tensors_of(record, form, p), ACCUMULATOR: p}
    for name, tensor in given.items():
        path, slot = _key(name)
        if slot not in like.get(path, ()):
            raise _error(f"this Trainer has no state tensor {name}")
        if slot != ACCUMULATOR and path not in counts:
            raise _error(f"'counts' lacks {path}, although the state has its {slot}")
        if slot == ACCUMULATOR and not state["micro_steps"]:
            raise _error(f"it has {name}, but was not saved in the middle of gradient accumulation")
        _check_like(str(name), tensor, like[path][slot])
    for path, count in counts.items():
        if path not in parameters:
            raise _error(f"the model has no parameter {path}")
        _check_whole(f"counts[{path!r}]", count)
        slots = [slot for slot in like.get(path, record.slots) if slot != ACCUMULATOR]
        needed = [_saved_name(StateKey(path, slot)) for slot in slots]
        lacking = [name for name in needed if name not in given]
        if lacking:
            raise _error(f"{lacking[0]} is missing")


def _check_counters(state: Mapping[str, Any], steps: int) -> None:
    for name in ("updates", "micro_steps", "samples", "gradient_accumulation_steps"):
        _check_whole(name, state[name])
    if state["micro_steps"] and state["gradient_accumulation_steps"] != steps:
        raise _error(
            "it was saved in the middle of an accumulation over "
            f"{state['gradient_accumulation_steps']} micro-batches, but "
            f"gradient_accumulation_steps is {steps} here; fix: save between optimizer updates"
        )
    if state["micro_steps"] >= steps:
        raise _error(
            f"micro_steps is {state['micro_steps']}, but gradient_accumulation_steps is {steps}"
        )
    held = any(_key(name).slot == ACCUMULATOR for name in state["optimizer"])
    if state["micro_steps"] and not held:
        raise _error(
            "it was saved in the middle of gradient accumulation, but the "
            "accumulated gradients are missing"
        )


def _check_random(state: Mapping[str, Any]) -> None:
    _check_like("seed", state["seed"], torch.zeros(2, dtype=torch.int64))
    for name in ("left_out", "evaluations"):  # states of older versions have none
        _check_whole(name, state.get(name, 0))
    _check_stream(state.get("stream", [0, 0]))
    if state["generator"] is None:
        return
    try:
        torch.Generator().set_state(state["generator"])
    except (RuntimeError, TypeError) as error:
        raise _error(f"generator: {str(error).splitlines()[0]}") from None


def _check_stream(stream: Any) -> None:
    if not isinstance(stream, Sequence) or len(stream) != 2:
        raise _error(f"stream is {stream!r}, no two seeds")
    for seed in stream:
        _check_whole("stream", seed)
        if seed > WORD:
            raise _error(f"stream is {stream!r}, no two seeds of 64 bits")


def _check_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _error(f"{name} is {value!r}, not a count")
