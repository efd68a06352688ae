"""Parameters that have a gradient and no update, or none in some steps, beside transformers'."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import arguments, assert_same_run, causal_lm, language
from torch import nn

from onward.errors import EagerWarning
from onward.integrations.transformers import Trainer

KINDS: tuple[Any, ...] = (Trainer, transformers.Trainer)


@pytest.mark.parametrize("norm", [1.0, 0.05, 0.0], ids=["clips", "clips much", "does not clip"])
@pytest.mark.parametrize("window", [1, 2])
def test_parameters_that_the_optimizer_does_not_hold(
    norm: float, window: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients of parameters outside the optimizer count in the norm, for clipping and in the
    log."""
    caplog.set_level(logging.WARNING, "onward")
    trainers = []
    for kind in KINDS:
        model = causal_lm()
        held = [p for n, p in model.named_parameters() if not n.endswith("bias")]
        optimizer = torch.optim.SGD(held, lr=0.1)
        args = arguments(
            tmp_path, max_steps=2, max_grad_norm=norm, gradient_accumulation_steps=window
        )
        trainers.append(language(kind, model, args, optimizers=(optimizer, None)))
        trainers[-1].train()
    assert_same_run(*trainers)
    assert "is in no parameter group of the optimizer" in caplog.text


class Sometimes(nn.Module):
    """A region that runs in PyTorch within a graph, counts its calls, and uses a layer only if the
    data say so."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.rare, self.calls = layer, nn.Linear(16, 16), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.layer(x) * (1.0 + 0.25 * self.calls)
        return self.rare(y) if float(x.detach().abs().max()) > 1e3 else y


@pytest.mark.parametrize("window", [1, 2])
def test_a_part_that_leaves_a_layer_out(window: int, tmp_path: Path) -> None:
    """A refused step has run the region; the eager step in its place must find it as it was, and no
    zero gradient by which weight decay would move the layer."""
    trainers = []
    for kind in KINDS:
        model = causal_lm()
        block: Any = model.transformer.h[0]
        block.ln_2 = Sometimes(block.ln_2)
        args = arguments(
            tmp_path, max_steps=2, weight_decay=0.5, gradient_accumulation_steps=window
        )
        trainers.append(language(kind, model, args))
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "(?s).*in eager PyTorch within the graph", EagerWarning
            )
            trainers[-1].train()
    assert_same_run(*trainers)
    calls = [t.model.transformer.h[0].ln_2.calls for t in trainers]
    assert calls[0] == calls[1] == 2 * window
