"""Threads that train and evaluate different models at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny import batch, gpt2
from torch import nn
from torch.nn import functional as F

import onward
from onward.capture import CapturedModule, CaptureRequest
from onward.capture.trace import export as trace
from onward.compile import Compiler


def test_trainers_with_dropout_draw_the_same_beside_others() -> None:
    """Two train at once, and an accelerated model is evaluated meanwhile: each is as alone."""
    given = batch(4, 12)
    evaluated = gpt2(0.3, layers=1).eval()
    with torch.no_grad():
        want = float(evaluated(**given).loss)
    onward.accelerate(evaluated)

    def train(model: nn.Module, seed: int) -> list[float]:
        trainer = onward.Trainer(model, onward.optim.AdamW(), options={"seed": seed})
        return [float(trainer.train_step(given).loss) for _ in range(6)]

    def evaluate(_: int) -> float:
        with torch.no_grad():
            return float(evaluated(**given).loss)

    models = [[gpt2(0.3, layers=1) for _ in range(2)] for _ in range(2)]
    alone = [train(model, seed) for seed, model in enumerate(models[0])]
    assert len({tuple(losses) for losses in alone}) == 2
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(train, model, seed) for seed, model in enumerate(models[1])]
        found = list(pool.map(evaluate, range(12)))
    assert [run.result() for run in runs] == alone
    assert found == pytest.approx([want] * 12, rel=1e-6)


class Listed(nn.Module):
    """Layers in a list, whose class a trace changes for a while."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.layers, self.act = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act()
        return self.layers[1](self.layers[0](x))


@pytest.mark.parametrize("way", ["accelerate", "Trainer"])
def test_a_trace_in_another_thread_changes_no_model(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    plain, x = Compiler.capture, torch.randn(3, 4)

    def capture(self: Compiler, request: CaptureRequest) -> CapturedModule:
        made.append(request.model)
        return plain(self, request)

    monkeypatch.setattr(Compiler, "capture", capture)
    begun = threading.Event()

    def wait() -> None:
        if trace._tracing:
            begun.set()
            time.sleep(0.3)

    mine, others = Listed(), Listed(wait)
    if way == "accelerate":
        call: Any = onward.accelerate(mine)
    else:
        trainer = onward.Trainer(mine, onward.optim.SGD(lr=0.0), F.mse_loss)
        call = lambda x: trainer.train_step(x, x)  # noqa: E731
    call(x)
    onward.accelerate(others)
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(others, x)
        assert begun.wait(60)
        call(x)
        run.result()
    assert made == [mine, others]
