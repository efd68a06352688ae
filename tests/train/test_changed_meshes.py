"""Checkpoints go from any mesh to any other: a run that changes its mesh is the run that does
not."""

from __future__ import annotations

import itertools
from pathlib import Path

import meshes_program
import pytest
import torch
from meshes_program import MESHES
from ranks_cases import apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run_name", "names"),
    [
        ("gpt2 within a window", ["one process", "dp 2", "zero 2 of 2", "cp 2", "pp 2"]),
        (
            "gpt2 within a window",
            ["one process", "cp 2 x tp 2", "zero 2 x cp 2", "zero 2 x pp 2"],
        ),
        ("t5 between updates", ["one process", "zero 3 of 2", "tp 2", "dp 2 x pp 2"]),
        ("t5 between updates", ["one process", "zero 3 x pp 2", "pp 2 x cp 2"]),
    ],
)
def test_a_run_goes_on_from_any_mesh_to_any_other(
    run_name: str, names: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """From each of the meshes to each, with `--whole` from and to all of them."""
    if request.config.getoption("--whole"):
        names = list(MESHES)
    through = meshes_program.run(tmp_path, "save", run_name, names)
    after = meshes_program.run(tmp_path, "resume", run_name, names)
    want = through["one process"]
    odd = [f"{mesh} throughout" for mesh in names if apart(through[mesh], want) > 1e-6]
    for mesh, source in itertools.product(names, [*names, "new"]):
        distance = apart(after[mesh][source], want)
        odd += [f"from {source} to {mesh}: {distance:.1e}"] if distance > 1e-6 else []
    assert not odd, "\n".join(odd)
    for mesh in names:
        assert ("torch's" in after[mesh]) == ("between" in run_name)
        for key, x in through[mesh].items():
            assert torch.equal(after[mesh][mesh][key], x), f"{mesh}: {key}"
