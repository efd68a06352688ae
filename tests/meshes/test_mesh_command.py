"""`onward explain --mesh`: what it prints, as text and as JSON, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from onward.cli import main

SMALL = ["gpt2-tiny", "--batch_size", "2", "--sequence_length", "16"]
CLUSTER = """
device: {bf16: 1.0e+12, fp32: 1.0e+12, memory_bandwidth: 1.0e+11, memory: 1.0e+10, attention: 1e12}
in_node: {bandwidth: 1.0e+10, latency: 1.0e-5}
across: {bandwidth: 1.0e+9, latency: 1.0e-4}
per_node: 4
"""


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER, encoding="utf-8")
    return str(path)


def test_one_mesh(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *SMALL, "--mesh", "dp_replicate=2", "--cluster", cluster]) == 0
    said = capsys.readouterr().out
    assert said.startswith("meshes on cluster, ")
    assert "\ndp_replicate=2: " in said and "exchanges of dp_replicate=2 in an update" in said
    assert "along dp_replicate a rank sends" in said


def test_meshes_of_so_many_ranks(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["explain", *SMALL, "--mesh", "auto", "--ranks", "4", "--cluster", cluster, "--json"]
    assert main(line) == 0
    found = json.loads(capsys.readouterr().out)
    meshes = found["meshes"]
    assert {"tp": 4} in [one["mesh"] for one in meshes]
    assert all(math.prod(one["mesh"].values()) == 4 for one in meshes)
    for one in meshes:
        memory = one["memory_bytes"]
        assert memory["total"] == sum(n for kind, n in memory.items() if kind != "total")
    named = {(*x["mesh"].items(), x["zero"], x["sequence_parallel"]) for x in meshes}
    assert len(named) == len(meshes)
    assert found["memory_of_a_rank"] == 1e10


def test_a_stage_by_name(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "explain",
        *SMALL,
        "--mesh",
        "dp_shard=2",
        "--zero",
        "3",
        "--cluster",
        cluster,
        "--json",
    ]
    assert main(line) == 0
    [one] = json.loads(capsys.readouterr().out)["meshes"]
    assert one["zero"] == 3 and any(x["op"] == "AllGather" for x in one["exchanges"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ranks", "2"], "--ranks needs --mesh, in --ranks; fix: add --mesh"),
        (
            ["--mesh", "auto"],
            "--mesh auto needs a number of processes, in --mesh; fix: add --ranks",
        ),
        (["--mesh", "tp=0"], "mesh is 'tp=0'; fix: ranks by axis"),
        (["--mesh", "tp=2", "--profile"], "--mesh runs no step, in --profile"),
        (["--mesh", "tp=2", "--memory", "2GB"], "--memory does not go with --mesh, in --memory"),
        (["--mesh", "tp=2", "--loop", "module"], "the step of a loop of your own has no mesh"),
        (["--mesh", "tp=2", "--cluster", "none.yaml"], "none.yaml cannot be read"),
        (["--mesh", "dp_replicate=2", "--zero", "1"], "of which there is one"),
        (["--mesh", "auto", "--ranks", "0"], "give a value from 1 to 4096"),
    ],
    ids=str,
)
def test_what_is_refused(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *SMALL, *more]) == 2
    said = capsys.readouterr()
    assert said.out == "" and message in said.err and said.err.count("\n") == 1
