"""Two ranks on hosts of their own (namespaces of the network): a link that is cut ends both within
the time that ranks wait, and each names the other; a link that is slow changes nothing."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import cut_network_program
import pytest
from cut_network_program import SECONDS, STEPS, Hosts

WHY_NOT = cut_network_program.refusal()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
MOST = 240.0  # seconds of a run


def ended(started: list[subprocess.Popen[str]]) -> list[int]:
    until = time.monotonic() + MOST
    try:
        said = [p.communicate(timeout=max(1.0, until - time.monotonic()))[1] for p in started]
    finally:
        for process in started:
            process.kill()
    assert all(p.returncode in (0, 3) for p in started), "\n".join(said)
    return [process.returncode for process in started]


def trained(folder: Path, hosts: Hosts) -> list[str]:
    assert ended([hosts.start(folder, rank, STEPS) for rank in range(2)]) == [0, 0]
    return [(folder / f"losses{rank}").read_text(encoding="ascii") for rank in range(2)]


def test_a_link_that_is_cut_ends_both(tmp_path: Path) -> None:
    with cut_network_program.hosts() as hosts:
        started = [hosts.start(tmp_path, rank, 10**6) for rank in range(2)]
        until = time.monotonic() + MOST
        steps = [tmp_path / f"step{rank}" for rank in range(2)]
        while time.monotonic() < until and not all(path.exists() for path in steps):
            time.sleep(0.1)
            assert all(process.poll() is None for process in started)
        hosts.cut()
        assert ended(started) == [3, 3]
    for rank in range(2):
        waited, _, line = (tmp_path / f"said{rank}").read_text(encoding="utf-8").partition(" ")
        assert float(waited) < 4 * SECONDS + 30, line
        assert f"rank {1 - rank} " in line and "fix: " in line and "\n" not in line, line


def test_a_link_that_is_slow_changes_no_bit(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("fast", "slow")]
    found: list[list[str]] = []
    for folder in folders:
        folder.mkdir()
        with cut_network_program.hosts() as hosts:
            if folder.name == "slow":
                try:
                    hosts.delay(20)
                except (OSError, subprocess.CalledProcessError) as error:
                    pytest.skip(f"packets cannot be delayed here: {error}")
            found.append(trained(folder, hosts))
    assert found[0] == found[1] and found[0][0] == found[0][1]
