"""torch's FSDP2 around an accelerated model over two processes: as around the eager model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_program import KINDS, RANKS, run
from hf_runs import CLOSE, assert_close_tensors

LOOSE: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-3}  # bf16


@pytest.mark.slow
def test_fully_shard_over_gloo(tmp_path: Path) -> None:
    """In each way of sharding; one start of two processes, which takes most of the time."""
    results = run(tmp_path)
    first, second = (results["eager", "whole", rank]["numbers"] for rank in range(RANKS))
    assert not torch.equal(first, second), "each rank has data of its own"
    ours = [(kind, way) for kind, ways in KINDS.items() if kind != "eager" for way in ways]
    assert len(ours) == 8
    for kind, way in ours:
        for rank in range(RANKS):
            at = f"{kind} {way}, rank {rank}"
            found, want = results[kind, way, rank], results["eager", way, rank]
            near: dict[str, Any] = LOOSE if way == "autocast" else CLOSE
            assert_close_tensors(found, want, at, near)
