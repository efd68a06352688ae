"""DeepSpeed's ZeRO-1 and ZeRO-2 around an accelerated model, on CPUs: as around the eager model."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from deepspeed_program import RANKS, RUNS, run
from hf_runs import CLOSE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("zero"))


@pytest.mark.parametrize("kind, stage", [r for r in RUNS if r[0] != "eager"])
def test_zero(kind: str, stage: int, results: Any) -> None:
    for rank in range(RANKS):
        found, want = results[kind, stage, rank], results["eager", stage, rank]
        assert found.keys() == want.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, want[name], **CLOSE)
