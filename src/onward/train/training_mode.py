"""The model in training or evaluation mode, for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

# classes whose `train` does no more than `nn.Module`'s, to what a forward computes
_PLAIN = ("torch.nn.modules.module", "transformers.modeling_utils")


@contextmanager
def training_mode(model: torch.nn.Module, training: bool) -> Generator[None]:
    """Within it the model trains, or evaluates; each submodule's own flag is put back, by way of
    the model's own `train` where it has one."""
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
    """Whether a module's `train` or `eval` is its own, and may set more than flags."""
    kinds = {c for m in model.modules() for c in type(m).__mro__}
    own = (c for c in kinds if "train" in vars(c) or "eval" in vars(c))
    return any(c.__module__ not in _PLAIN for c in own) or any(
        "train" in vars(m) or "eval" in vars(m) for m in model.modules()
    )
