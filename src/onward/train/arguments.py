"""Checks of a Trainer's arguments, before anything is made of them: one clear line for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.environment import check_variables
from onward.errors import OnwardError
from onward.kernels import forced_engine
from onward.option_readers import read_names
from onward.options import TrainerOptions
from onward.prepare.batch import Batch
from onward.rewrite import switched_off


def checked_options(options: TrainerOptions | Mapping[str, Any] | None) -> TrainerOptions:
    """Checks options given as TrainerOptions, a dict or None. Raises OnwardError for values that
    they or the environment cannot have."""
    found = TrainerOptions.of(options)
    check_variables()
    switched_off(found.disable)
    forced_engine()
    return found


def check_arguments(model: Any, loss_fn: Any, verify: Any) -> None:
    """Raises OnwardError for the first argument of a wrong type."""
    if not isinstance(model, torch.nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise OnwardError(f"model is {given}; fix: pass a torch.nn.Module instance")
    if loss_fn is not None and (isinstance(loss_fn, type) or not callable(loss_fn)):
        raise OnwardError(
            f"loss_fn is {loss_fn!r}; fix: pass a function of (outputs, target), such as "
            "torch.nn.functional.cross_entropy, or None if the model returns its loss"
        )
    if not isinstance(verify, bool):
        raise OnwardError(f"verify={verify!r} is invalid; fix: True or False")


def check_loss(loss_fn: Any) -> None:
    """Raises OnwardError for a loss function that has parameters to train."""
    own = loss_fn.parameters() if isinstance(loss_fn, torch.nn.Module) else ()
    if any(p.requires_grad for p in own):
        raise OnwardError(
            "loss_fn has parameters that require grad, which would not be trained; fix: make "
            "it a submodule of the model, or requires_grad_(False)"
        )


def check_inputs(batch: Batch) -> None:
    """Raises OnwardError for a batch that requires gradients, which a step does not return."""
    if not any(x.requires_grad for x in batch.tensors):
        return
    for name, value in batch.named().items():
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(value)):
            raise OnwardError(
                f"the batch's {name} requires grad, and a step does not pass gradients to its "
                "batch; fix: detach() it, or make the module that computed it a part of the "
                "model"
            )


def names_to_fetch(options: TrainerOptions, fetch: Any) -> tuple[str, ...]:
    """The outputs that a step returns: those of the options, then those asked for with `fetch=`."""
    if type(fetch) is tuple and not fetch:  # each step asks
        return tuple(options.fetch)
    return tuple(dict.fromkeys((*options.fetch, *read_names("fetch", fetch))))
