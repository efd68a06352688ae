"""A small sample of `false_alarms.py`: verification is content with models that are right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from false_alarms import MODELS, alarm, compiled_once, trainer

SAMPLE = {"mlp": 4, "attention": 4, "nn.Transformer": 2, "bert": 1}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_right_model_raises_no_alarm(name: str) -> None:
    made = trainer(name)
    with compiled_once():
        for seed in range(SAMPLE[name]):
            assert not alarm(made, name, seed)


def test_ten_models_are_asked() -> None:
    assert len(MODELS) == 10


def test_one_unlucky_draw_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where eager's distance happens to be nothing on the batch, more runs decide."""
    from onward.train.verify.engines import Engines

    plain = Engines.eager
    asked: list[bool] = []

    def lucky(self: Engines, exact: bool, weights: object = None) -> dict[str, torch.Tensor]:
        asked.append(weights is not None)
        return plain(self, exact or weights is None, weights)  # type: ignore[arg-type]

    monkeypatch.setattr(Engines, "eager", lucky)
    assert not alarm(trainer("attention"), "attention", 0)
    assert sum(asked) >= 16, "eight more runs, in both precisions"
