"""The predicted time of steps on a GPU: the committed results beside what was measured there, and
beside what is predicted now."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

cases: Any = import_module("suite.cases")
gpu_time: Any = import_module("suite.gpu_time")

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
LAST = sorted(RESULTS.glob("gpu_time-*.json"))[-1]


def rows() -> list[dict[str, Any]]:
    return json.loads(LAST.read_text(encoding="utf-8"))["cases"]


def test_every_case_is_predicted_for_where_it_was_measured() -> None:
    found = [(row["name"], row["gpu"], row["date"]) for row in rows()]
    expected: list[tuple[str, str, str]] = []
    for case in cases.GPU:
        there = gpu_time.measured(case, RESULTS)
        expected += [(case.name, row["gpu"], row["date"]) for row in there]
        expected += [] if there else [(case.name, gpu_time.GPU, "")]
    assert found == expected
    assert {date for _, _, date in found} >= {"2026-11-23", "2026-11-27"}


def test_eagers_measured_steps_are_within_a_fifth() -> None:
    """All that were measured, the three models of 2026-11-23 among them."""
    pairs = {
        (row["name"], row["gpu"]): (row["predicted"]["eager_step"], row["seconds"]["eager"])
        for row in rows()
        if "eager" in row["seconds"]
    }
    assert len(pairs) >= 7
    for name, (predicted, there) in pairs.items():
        assert predicted == pytest.approx(there, rel=0.2), name


def test_a_recorded_step_is_within_a_fifth_and_short_ones_are_not_predicted() -> None:
    """One of Onward's measured steps is long enough and was recorded as it is now."""
    own = {(row["name"], row["gpu"]): row for row in rows() if "onward" in row["seconds"]}
    row = own["GPT-2 medium, bf16", "H200"]
    assert row["predicted"]["step"] == pytest.approx(row["seconds"]["onward"], rel=0.2)
    for row in rows():
        if row["name"].startswith(("tutorial", "two towers")):
            assert row["predicted"]["step"] is None and row["predicted"]["speedup"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tutorial transformer, fp32", "two towers, tf32"])
def test_the_results_are_what_is_predicted_now(name: str) -> None:
    case = next(c for c in cases.GPU if c.name == name)
    row = next(row for row in rows() if row["name"] == name and row["gpu"] == "H100")
    now = gpu_time.predicted(case, "H100")["predicted"]
    for engine in ("onward", "eager"):
        for kind, seconds in row["predicted"][engine].items():
            assert now[engine][kind] == pytest.approx(seconds, rel=0.05), (engine, kind)
