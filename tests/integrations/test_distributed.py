"""DistributedDataParallel of an accelerated model over two processes: as of the eager model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ddp_program import OPTIONS, run
from hf_runs import CLOSE


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("options", OPTIONS)
def test_ddp_over_gloo(options: str, tmp_path: Path) -> None:
    kinds = ("eager", "accelerate", "Module")
    eager, *others = (run(kind, options, tmp_path) for kind in kinds)
    assert not torch.equal(eager[0]["losses"], eager[1]["losses"]), "ranks have data of their own"
    for ranks in others:
        for rank, want in zip(ranks, eager, strict=True):
            assert rank.keys() == want.keys()
            for name, tensor in rank.items():
                torch.testing.assert_close(tensor, want[name], **CLOSE)
