"""DistributedDataParallel of an accelerated model over two processes: as of the eager model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_program import KINDS, RANKS, run
from hf_runs import CLOSE

OURS = [(kind, options) for kind, names in KINDS.items() if kind != "eager" for options in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("kind, options", OURS)
def test_ddp_over_gloo(kind: str, options: str, results: Any) -> None:
    for rank in range(RANKS):
        found, want = results[kind, options, rank], results["eager", options, rank]
        assert found.keys() == want.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, want[name], **CLOSE)


@pytest.mark.slow
def test_ranks_have_data_of_their_own(results: Any) -> None:
    first, second = (results["eager", "plain", rank]["losses"] for rank in range(RANKS))
    assert not torch.equal(first, second)
