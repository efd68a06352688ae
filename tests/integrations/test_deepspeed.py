"""DeepSpeed's ZeRO-1 and ZeRO-2 around an accelerated model, on CPUs: as around the eager model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from deepspeed_program import run
from hf_runs import CLOSE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
    ),
]


@pytest.mark.parametrize("stage", [1, 2])
def test_zero(stage: int, tmp_path: Path) -> None:
    eager, *others = (run(kind, stage, tmp_path) for kind in ("eager", "accelerate", "Module"))
    for ranks in others:
        for rank, want in zip(ranks, eager, strict=True):
            assert rank.keys() == want.keys()
            for name, tensor in rank.items():
                torch.testing.assert_close(tensor, want[name], **CLOSE)
