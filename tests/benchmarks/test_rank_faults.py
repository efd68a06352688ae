"""The rows of ranks in the benchmark of faults: what counts as kept, and one run of Onward."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

rows: Any = import_module("suite.fault_ranks")
program: Any = import_module("suite.rank_faults_program")
RunOfRanks = rows.RunOfRanks

GOOD: dict[str, Any] = {"digest": "a", "finite": True, "updates": 6, "from": 0}
NAMED = "RanksApartError: rank 1 has ended (process 5 on here)"


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (RunOfRanks({0: 1}, said=NAMED), ""),
        (RunOfRanks({0: 1}, said="Read error: Connection reset by peer"), "ended without naming"),
        (RunOfRanks({0: 1}, said=NAMED, left=2), "left 2 processes"),
        (RunOfRanks({0: 0}, said=NAMED), "trained on"),
        (RunOfRanks({1: -9}), "hung for "),
    ],
    ids=str,
)
def test_how_the_others_end(found: RunOfRanks, outcome: str) -> None:
    assert rows._others_end(found).startswith(outcome) and bool(rows._others_end(found)) == bool(
        outcome
    )


@pytest.mark.parametrize(
    ("ends", "outcome"),
    [
        ([{**GOOD, "from": 2}] * 2, ""),
        ([{**GOOD, "from": 2}, {**GOOD, "from": 2, "digest": "b"}], "ended with other bits"),
        ([GOOD] * 2, "began anew"),
        ([GOOD], "did not end"),
    ],
    ids=str,
)
def test_how_a_run_that_is_started_again_ends(ends: list[dict[str, Any]], outcome: str) -> None:
    whole = RunOfRanks(ends={0: GOOD, 1: GOOD})
    assert rows._resumed(whole, RunOfRanks(ends=dict(enumerate(ends)))) == outcome


def test_how_unlike_ranks_end() -> None:
    apart = RunOfRanks({0: 0, 1: 0}, ends={0: GOOD, 1: {**GOOD, "digest": "b"}})
    assert rows._refused(apart, program.WEIGHTS) == "trained on, apart"
    assert rows._refused(RunOfRanks({0: 1, 1: 1}, said=NAMED), program.WEIGHTS) == ""
    spoilt = RunOfRanks({0: 0, 1: 0}, ends={0: {**GOOD, "finite": False}, 1: GOOD})
    assert rows._nan(spoilt) == "NaN in the weights"
    told = RunOfRanks({0: 0, 1: 0}, said="on rank 1 batch", ends={0: GOOD, 1: GOOD})
    assert rows._nan(told) == ""


@pytest.mark.slow
def test_a_killed_rank_of_onward() -> None:
    found = rows.run("Onward", program.KILLED)
    assert found.codes[1] == -9 and rows._others_end(found) == "", found.said
