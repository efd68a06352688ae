"""Whether engines compute the same: losses beside eager's, and beside those of another variant."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SAME = 1e-4  # of each loss, relative: variants of Onward with equal dropout


@dataclass(frozen=True)
class Tolerance:
    """How far losses may lie from eager's.

    level: of the mean loss, with dropout on, relative. exact: of a loss without dropout, in nats; a
    share of the loss where `relative`.
    """

    level: float
    exact: float = 1e-3
    relative: bool = False


def exact_in(precision: str) -> dict[str, Any]:
    """`exact` and `relative` in a precision, where a benchmark has no others: bf16 has 8 bits."""
    return {"exact": 5e-3, "relative": True} if precision == "bf16" else {}


def checked(
    results: Mapping[str, dict[str, Any]], exact: Mapping[str, list[float]], tolerance: Tolerance
) -> dict[str, Any]:
    """Against eager: the level with dropout on, and each step without."""
    checks: dict[str, Any] = {
        "level_tolerance": tolerance.level, "exact_tolerance": tolerance.exact,
        "relative": tolerance.relative,
    }  # fmt: skip
    level: dict[str, float] = {}
    want = results.get("eager", {}).get("losses")
    for name, entry in results.items():
        if want and len(entry["losses"]) == len(want):
            mean = statistics.fmean(want)
            level[name] = abs(statistics.fmean(entry["losses"]) - mean) / abs(mean)
    steps: dict[str, float] = {}
    for name, losses in exact.items():
        if "eager" in exact:
            differences = [
                abs(a - b) / (abs(b) if tolerance.relative else 1.0)
                for a, b in zip(losses, exact["eager"], strict=True)
            ]
            steps[name] = worst(differences)
    checks["level_difference"], checks["exact_difference"] = level, steps
    # A NaN is not below any tolerance, so that it fails here.
    checks["passed"] = all(value <= tolerance.level for value in level.values()) and all(
        value <= tolerance.exact for value in steps.values()
    )
    return checks


def worst(differences: Iterable[float]) -> float:
    """The largest; NaN where one is NaN, which `max` would pass over."""
    found = list(differences)
    return math.nan if any(math.isnan(d) for d in found) else max(found)


def ratio(entry: Mapping[str, Any], key: str, peer: Mapping[str, Any] | None) -> float | None:
    """`entry[key]` as a multiple of the peer's; None where either is missing."""
    if peer is None or not peer.get(key) or not entry.get(key):
        return None
    return entry[key] / peer[key]


def compare(entry: dict[str, Any], base: Mapping[str, Any]) -> None:
    """Adds ratios to another variant of Onward, and the largest relative difference of a loss."""
    for key in ("step_s", "peak_step_bytes", "predicted_peak_bytes"):
        entry[f"{key}_ratio"] = ratio(entry, key, base)
    pairs = zip(
        [entry.get("first_loss"), *entry["losses"]],
        [base.get("first_loss"), *base["losses"]],
        strict=False,
    )
    differences = [abs(a - b) / abs(b) for a, b in pairs if a is not None and b is not None]
    entry["loss_difference"] = worst(differences) if differences else None


def wrong(entry: Mapping[str, Any]) -> bool:
    """Whether a variant failed or computed something else."""
    difference = entry.get("loss_difference")
    # Not "difference > tolerance": a NaN is not above any tolerance either.
    return "error" in entry or difference is None or not difference <= SAME


def failed(cases: Iterable[Mapping[str, Any]]) -> bool:
    """Whether an engine failed or losses disagree anywhere."""
    return any(
        not found["checks"]["passed"] or any("error" in e for e in found["engines"].values())
        for found in cases
    )
