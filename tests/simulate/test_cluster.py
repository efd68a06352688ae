"""Descriptions of clusters: what a file may say, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.cli import main
from onward.errors import OnwardError
from onward.simulate.cluster import BUILT_IN, Cluster, built_in, read_cluster

GOOD = """
name: small
per_node: 4
device: {bf16: 100e12, memory_bandwidth: 1.0e+12, memory: 32e9, attention: 50e12}
in_node: {bandwidth: 100e9, latency: 3e-6, sm_share: 0.1}
across: {bandwidth: 10e9, latency: 10e-6}
failures: {node_hours: 1000}
efficiency: {gemm: 0.8, memory: 0.9, in_node: 0.7, across: 0.8}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, GOOD))
    assert isinstance(cluster, Cluster) and cluster.name == "small" and cluster.per_node == 4
    assert cluster.device.bf16 == 100e12 and cluster.device.memory_bandwidth == 1e12
    assert cluster.across.sm_share == 0 and cluster.failures.node_hours == 1000
    assert cluster.efficiency.across == 0.8


# a part of the good file, what stands in its place, and a part of the line that refuses it
BAD = {
    "no mapping": (GOOD, "- 1\n- 2\n", "is no mapping of sections"),
    "no yaml": (GOOD, "a: [1, 2\n", "cannot be read"),
    "a tag": (GOOD, "a: !!python/object:os.system {}\n", "cannot be read"),
    "bytes": (GOOD, "\x00", "cannot be read"),
    "empty": (GOOD, "", "is no mapping of sections"),
    "a strange section": ("failures:", "failure:", "unknown section 'failure'"),
    "a strange key": ("sm_share", "share", "unknown key 'share' in in_node"),
    "a missing key": ("bf16: 100e12, ", "", "has no bf16 in device"),
    "a missing section": ("across: {bandwidth: 10e9, latency: 10e-6}", "", "has no bandwidth"),
    "a text": ("100e9", "fast", "in_node.bandwidth 'fast', which is no number above 0"),
    "below 0": ("32e9", "-1", "device.memory -1, which is no number above 0"),
    "nothing": ("32e9", "0", "device.memory 0, which is no number above 0"),
    "not a number": ("32e9", ".nan", "device.memory nan"),
    "without end": ("32e9", ".inf", "device.memory inf"),
    "a truth": ("32e9", "true", "device.memory True"),
    "a list": ("32e9", "[1]", "device.memory [1]"),
    "above 1": ("gemm: 0.8", "gemm: 1.2", "efficiency.gemm 1.2, which is above 1"),
    "a half device": ("per_node: 4", "per_node: 4.5", "per_node 4.5"),
    "no devices": ("per_node: 4", "per_node: 0", "per_node 0"),
    "a section that is none": ("{node_hours: 1000}", "7", "section failures that is no mapping"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part, other, said = BAD[case]
    assert part in GOOD
    path = written(tmp_path, GOOD.replace(part, other))
    assert main(["simulate", str(path), "--model", "gpt2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err and "; fix: " in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no cluster is given"),
        (("b200", "--model", "gpt2"), "no cluster 'b200' is built in; fix: one of a100-80"),
        (("gone.yaml", "--model", "gpt2"), "gone.yaml cannot be read"),
        (("h100",), "no model is given"),
        (("h100", "--hidden", "64", "--layers", "2"), "no --heads is given"),
        (("h100", "--model", "gpt5"), "no model 'gpt5', in --model; fix: one of bert-large"),
        (("h100", "--model", "gpt2", "--hidden", "64"), "leave one of them out"),
        (("h100", "--model", "gpt2", "--ranks", "0"), "ranks is 0, in --ranks"),
        (("h100", "--model", "gpt2", "--zero", "4"), "zero is 4, in --zero"),
        (
            ("h100", "--model", "gpt2", "--batch", "3", "--pp", "1", "--tp", "1"),
            "no mesh of 8 ranks",
        ),
        (("a100-80", "--model", "gpt2", "--dtype", "fp8"), "products of fp8 on this device"),
        (("h100", "--model", "gpt3-175b", "--ranks", "8"), "no mesh of 8 ranks fits"),
    ],
)
def test_bad_words_are_refused_in_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err and "; fix: " in err


def test_built_in_clusters_are_found_by_name() -> None:
    assert all(built_in(name).name == name for name in BUILT_IN)
    with pytest.raises(OnwardError, match="no cluster 'x' is built in"):
        built_in("x")
