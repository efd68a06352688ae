"""DistributedDataParallel of an accelerated model over two processes: as of the eager model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ddp_program import KINDS, RANKS, run
from hf_runs import assert_close_tensors


@pytest.mark.slow
def test_ddp_over_gloo(tmp_path: Path) -> None:
    """With each of DDP's options; one start of two processes, which takes most of the time."""
    results = run(tmp_path)
    first, second = (results["eager", "plain", rank]["losses"] for rank in range(RANKS))
    assert not torch.equal(first, second), "each rank has data of its own"
    ours = [(k, options) for k, names in KINDS.items() if k != "eager" for options in names]
    assert len(ours) == 5
    for kind, options in ours:
        for rank in range(RANKS):
            at = f"{kind} {options}, rank {rank}"
            found, want = results[kind, options, rank], results["eager", options, rank]
            assert_close_tensors(found, want, at)
