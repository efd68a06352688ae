"""Threads that train and evaluate different models at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import batch, gpt2
from torch import nn

import onward


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
