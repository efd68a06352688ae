"""DeepSpeed's ZeRO-1, ZeRO-2 and ZeRO-3 around an accelerated model, on CPUs, as around the
eager model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from deepspeed_program import RANKS, RUNS, run
from hf_runs import assert_close_tensors


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
def test_zero(tmp_path: Path) -> None:
    results = run(tmp_path)
    ours = [r for r in RUNS if r[0] != "eager"]
    assert len(ours) == 5
    for kind, stage in ours:
        for rank in range(RANKS):
            at = f"{kind} {stage}, rank {rank}"
            found, want = results[kind, stage, rank], results["eager", stage, rank]
            assert_close_tensors(found, want, at)
