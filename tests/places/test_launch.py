"""`deploy/launch.sh` and `processes.py`: how many processes and threads they start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from rendered import DEPLOY, program

processes = program(DEPLOY / "processes.py")
# Stands in for `onward`, `torchrun` and `python`: says its words and the number of threads.
ECHO = '#!/bin/sh\necho "{name} threads=${{OMP_NUM_THREADS:-}} $*"\n'
# Stands in for Python at processes.py: as on a machine with 8 cores and two GPUs.
PYTHON = '#!/bin/sh\n[ -z "$OMP_NUM_THREADS" ] || exit 1\nn=${2:-2}; echo "$n $((8 / n))"\n'
TRAIN = ("finetune", "--train_file", "a text.txt")


@pytest.fixture
def path(tmp_path: Path) -> str:
    programs = {name: ECHO.format(name=name) for name in ("onward", "torchrun")}
    for name, text in {**programs, "python": PYTHON}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}:/usr/bin:/bin"


def launched(path: str, *words: str, **variables: str) -> str:
    done = subprocess.run(
        ["bash", str(DEPLOY / "launch.sh"), *words],
        capture_output=True, text=True, env={"PATH": path, **variables},
    )  # fmt: skip
    return done.stdout.strip() if done.returncode == 0 else f"refused: {done.stderr.strip()}"


def test_words_that_train_nothing_start_one_process(path: str) -> None:
    assert launched(path, "doctor", "--measure") == "onward threads= doctor --measure"
    assert launched(path) == "onward threads="


def test_one_process_follows_the_quota_by_itself(path: str) -> None:
    assert launched(path, *TRAIN, NPROC_PER_NODE="1").startswith("onward threads= finetune")


def test_a_process_for_each_gpu_and_its_share_of_the_cores(path: str) -> None:
    assert launched(path, *TRAIN) == (
        "torchrun threads=4 --standalone --nproc-per-node=2 -m onward "
        "finetune --train_file a text.txt"
    )
    assert "threads=2 --standalone --nproc-per-node=4 " in launched(
        path, *TRAIN, NPROC_PER_NODE="4"
    )
    assert launched(path, *TRAIN, OMP_NUM_THREADS="3").startswith("torchrun threads=3 ")


@pytest.mark.parametrize("prefix", ["", "PET_"])
def test_several_machines(path: str, prefix: str) -> None:
    """By the script's own variables, and by those that Kubeflow's operator sets for torchrun."""
    names = {"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "a.b", "MASTER_PORT": "29511"}
    told = {f"{prefix}{name}": value for name, value in names.items()}
    assert launched(path, *TRAIN, **told, NPROC_PER_NODE="1").startswith(
        "torchrun threads=8 --nnodes=3 --nproc-per-node=1 --node-rank=2 --master-addr=a.b "
        "--master-port=29511 -m onward finetune"
    )
    del told[f"{prefix}MASTER_ADDR"]
    assert "is needed with several machines" in launched(path, *TRAIN, **told)


def test_a_rank_that_a_scheduler_has_started(path: str) -> None:
    given = {"LOCAL_RANK": "1", "RANK": "5", "WORLD_SIZE": "8", "NPROC_PER_NODE": "4"}
    assert launched(path, *TRAIN, **given).startswith("onward threads=2 finetune")
    given["OMP_NUM_THREADS"] = "7"
    assert launched(path, *TRAIN, **given).startswith("onward threads=7 finetune")


def quota_of(folder: Path, text: str) -> Path:
    """A file system in which the control group of a process has this quota."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text("0::/job\n")
    (folder / "sys/fs/cgroup/job").mkdir(parents=True)
    (folder / "sys/fs/cgroup/job/cpu.max").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("quota", "count", "threads"),
    [
        ("250000 100000", 1, 3),
        ("250000 100000", 2, 1),
        ("400000 100000", 2, 2),
        ("50000 100000", 4, 1),
        ("max 100000", 2, 8),
        ("6400000 100000", 4, 4),
    ],
)
def test_threads_follow_the_quota(
    quota: str, count: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    root = quota_of(tmp_path, quota)
    assert processes.shares(count, root) == (count, threads)


def test_a_process_for_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert processes.shares(None, tmp_path) == (1, 16)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert processes.shares(None, tmp_path) == (4, 4)


def test_a_number_that_is_none_is_refused() -> None:
    for words in (["two"], ["0"], ["1", "2"]):
        with pytest.raises(SystemExit, match="no number of processes"):
            processes.main(words)
