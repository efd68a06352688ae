"""The processors of a container: quotas as the kernel writes them, and who follows them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onward.kernels import quota as quotas
from onward.kernels.quota import CHOSEN_BY, follow_quota, own_choices, quota

# what lies where in the file system, and the processors
SYSTEMS: dict[str, tuple[dict[str, str], float | None]] = {
    "none": ({}, None),
    "version 2, no limit": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        None,
    ),
    "version 2, in a container": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"},
        1.5,
    ),
    "version 2, the least of all levels": (
        {
            "proc/self/cgroup": "0::/pods/one\n",
            "sys/fs/cgroup/pods/one/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/pods/cpu.max": "20000 10000\n",
        },
        2.0,
    ),
    "version 2, another name space": (
        {"proc/self/cgroup": "0::/../other\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
        0.5,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        3.0,
    ),
    "version 1, no limit": (
        {
            "proc/self/cgroup": "1:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "damaged": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "many\n"}, None),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_quota_is_the_least_of_all_levels(system: str, tmp_path: Path) -> None:
    files, want = SYSTEMS[system]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert quota(tmp_path) == want


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with 8 processors of 4 cores, and a PyTorch that has chosen 8 threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(quotas, "own_choices", lambda: {8, 4})
    for name in CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(8)
    follow_quota.cache_clear()
    yield
    follow_quota.cache_clear()
    torch.set_num_threads(before)


CASES: list[tuple[float | None, int, dict[str, str], int]] = [
    (None, 8, {}, 8),  # quota, threads before, environment; threads after
    (2.0, 8, {}, 2),
    (1.2, 8, {}, 2),
    (0.3, 8, {}, 1),
    (2.0, 4, {}, 2),
    (16.0, 8, {}, 8),
    (2.0, 5, {}, 5),  # nobody but the user chooses 5
    (2.0, 1, {}, 1),
    (2.0, 8, {"OMP_NUM_THREADS": "8"}, 8),
    (2.0, 8, {"MKL_NUM_THREADS": "8"}, 8),
]


@pytest.mark.parametrize(("allowed", "before", "environment", "want"), CASES)
def test_threads_follow_a_quota_unless_the_user_has_chosen(
    allowed: float | None,
    before: int,
    environment: dict[str, str],
    want: int,
    eight: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    del eight
    monkeypatch.setattr(quotas, "quota", lambda: allowed)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(before)
    with caplog.at_level(logging.WARNING, "onward"):
        follow_quota()
        assert torch.get_num_threads() == want
        torch.set_num_threads(7)  # from then on it is the user's
        follow_quota()
    assert torch.get_num_threads() == 7
    assert [f"it gets {want}" in line for line in caplog.messages] == [True] * (want != before)


def test_this_machine_has_processors_and_cores() -> None:
    assert max(own_choices()) >= min(own_choices()) >= 1
