"""Ranks that torchrun starts again after one of them was killed: they go on from the newest
checkpoint, and end as ranks of which none was killed, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import restarted_program
import torch
from restarted_program import EVERY, KILLED_AT, RANKS, STAGES


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole = restarted_program.run(tmp_path / "whole", is_killed=False)
    killed = restarted_program.run(tmp_path / "killed", is_killed=True)
    last = KILLED_AT - KILLED_AT % EVERY
    for zero in STAGES:
        for rank in range(RANKS):
            want, have = whole[rank][f"zero {zero}"], killed[rank][f"zero {zero}"]
            assert want["began"] == 0 and have["loss"] == want["loss"]
            assert torch.equal(have["draw"], want["draw"])
            for part in ("model", "optimizer"):
                assert have[part].keys() == want[part].keys()
                for name, x in want[part].items():
                    assert torch.equal(have[part][name], x), f"zero {zero}, {part}: {name}"
        # the first of the two runs was resumed once more at its end
        assert killed[0][f"zero {zero}"]["began"] >= last
