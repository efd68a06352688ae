"""A context with the model in training or evaluation mode."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

# modules with classes whose `train` changes no more than `nn.Module`'s, as far as a forward sees
_PLAIN = ("torch.nn.modules.module", "transformers.modeling_utils")


@contextmanager
def training_mode(model: torch.nn.Module, training: bool) -> Generator[None]:
    """A context in which the model is in training or evaluation mode. Afterwards each submodule has
    its own flag again, set by the model's own `train` if it has one."""
    if model.training and training:
        yield
        return
    before, flags = model.training, [(m, m.training) for m in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        if sets_more(model):
            model.train(before)
        for module, flag in flags:
            module.training = flag


def sets_more(model: torch.nn.Module) -> bool:
    """Whether any submodule has a `train` or `eval` of its own, which may set more than flags."""
    kinds = {c for m in model.modules() for c in type(m).__mro__}
    own = (c for c in kinds if "train" in vars(c) or "eval" in vars(c))
    return any(c.__module__ not in _PLAIN for c in own) or any(
        "train" in vars(m) or "eval" in vars(m) for m in model.modules()
    )
