"""The model in training or evaluation mode, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def training_mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """Within it the model trains, or evaluates; each submodule's own flag is put back."""
    if model.training and training:
        yield
        return
    flags = [(m, m.training) for m in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
