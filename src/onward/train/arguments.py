"""Checks of a Trainer's arguments, before anything is made of them: one clear line for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.config import (
    OnwardError,
    TrainerOptions,
    check_names,
    check_variables,
    read_names,
)
from onward.kernels import forced_engine
from onward.rewrite import switched_off
from onward.train.batch import Batch

_DESCRIBED = ("inputs", "outputs")


def checked_options(options: TrainerOptions | Mapping[str, Any] | None) -> TrainerOptions:
    """The options, also of a dict. Raises OnwardError for what they or the environment cannot
    mean."""
    found = TrainerOptions.of(options)
    check_variables()
    switched_off(found.disable)
    forced_engine()
    return found


def check_arguments(model: Any, loss_fn: Any, description: Any, verify: Any) -> None:
    """Raises OnwardError for the first argument of the wrong kind."""
    if not isinstance(model, torch.nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise OnwardError(f"model is {given}; fix: a torch.nn.Module instance")
    if loss_fn is not None and (isinstance(loss_fn, type) or not callable(loss_fn)):
        raise OnwardError(
            f"loss_fn is {loss_fn!r}; fix: a function of (outputs, target), such as "
            "torch.nn.functional.cross_entropy, or None where the model returns its loss"
        )
    if not isinstance(verify, bool):
        raise OnwardError(f"verify={verify!r}; fix: True or False")
    if description is not None:
        _check_description(description)


def _check_description(description: Any) -> None:
    fix = 'fix: {"inputs": [(name, shape), (name, shape, dtype), ...]}'
    if not isinstance(description, Mapping) or "inputs" not in description:
        raise OnwardError(f"model_desc is no dict with 'inputs'; {fix}")
    check_names("model_desc", "key", [str(k) for k in description], _DESCRIBED)
    entries = description["inputs"]
    if not isinstance(entries, list | tuple):
        raise OnwardError(f"model_desc['inputs'] is a {type(entries).__name__}; {fix}")
    for entry in entries:
        name, shape = entry[:2] if _is_entry(entry) else (None, None)
        sizes = shape if isinstance(shape, list | tuple) else [None]
        strange = [n for n in sizes if isinstance(n, bool) or not isinstance(n, int | str)]
        if not isinstance(name, str) or strange:
            raise OnwardError(f"model_desc lists {entry!r}; {fix}; a shape holds ints and names")


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and len(entry) in (2, 3)


def check_inputs(call: Batch) -> None:
    """Raises OnwardError for a batch into which eager code would pass gradients back."""
    if not any(x.requires_grad for x in call.tensors):
        return
    for name, value in call.named().items():
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(value)):
            raise OnwardError(
                f"the batch's {name} requires a gradient, which a step does not pass on; fix: "
                "detach() it, or make what computed it a part of the model"
            )


def names_to_fetch(options: TrainerOptions, fetch: Any) -> tuple[str, ...]:
    """Outputs that a step returns: those of the options, then those it was asked for."""
    return tuple(dict.fromkeys((*options.fetch, *read_names("fetch", fetch))))
