"""Schedules by name have the learning rates of transformers' own, and its state."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from onward.fitting.schedules import named_schedule

NAMES = [
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt",
]  # fmt: skip


def adamw() -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup", [0, 1, 7, 50])
def test_learning_rates_are_those_of_transformers(name: str, warmup: int) -> None:
    from transformers import get_scheduler

    optimizers = adamw(), adamw()
    ours = named_schedule(name, optimizers[0], warmup, 20)
    theirs = get_scheduler(name, optimizers[1], num_warmup_steps=warmup, num_training_steps=20)
    for _ in range(25):
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for optimizer, schedule in zip(optimizers, (ours, theirs), strict=True):
            optimizer.step()
            schedule.step()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.last_epoch == 25


def test_the_usual_ones_do_not_import_a_trainer() -> None:
    code = (
        "import sys, torch; from onward.fitting.schedules import named_schedule\n"
        "o = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)\n"
        "for n in ('linear', 'constant', 'constant_with_warmup'): named_schedule(n, o, 2, 9)\n"
        "assert 'transformers' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
