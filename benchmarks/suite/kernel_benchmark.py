"""The kernel benchmark: every call of the CPU's workloads, beside the machine's ceilings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.cases import Case
from suite.kernel_calls import Call, extra, harvested
from suite.kernel_report import seconds, table
from suite.kernel_table import NATIVE_OPS
from suite.kernel_timing import measure_call
from suite.limit import arithmetic_limit
from suite.progress import Clock, say
from suite.report import Writer, started
from suite.timing import ceiling, copy_rates


@dataclass(frozen=True)
class Settings:
    """What to time. ops: only these, all where empty. seconds: for each kernel of each call;
    ceiling_seconds: for the best matrix product of each workload. copied: bytes of the largest copy
    that is timed."""

    ops: frozenset[str]
    seconds: float
    ceiling_seconds: float
    copied: int


def run(
    cases: Sequence[Case], settings: Settings, threads: int, clock: Clock, write: Writer
) -> tuple[dict[str, Any], Path]:
    """The report, written after every workload."""
    report = started("Kernels on the CPU", threads=threads)
    say("ceilings")
    copies = copy_rates(settings.copied)
    threads = report["machine"]["threads"]
    limits = [arithmetic_limit(case, threads, settings.ceiling_seconds) for case in cases]
    product = max((limit["best_gflops"] for limit in limits), default=0.0)
    report |= {
        "copy_bytes_per_s": copies, "product_gflops": product, "no_case": [], "cases": [],
        "skipped": [],
    }  # fmt: skip
    groups: list[tuple[str, Callable[[], list[Call]]]] = [
        *((case.name, lambda case=case: harvested(case)) for case in cases), ("other calls", extra),
    ]  # fmt: skip
    seen: set[str] = set()
    path = write(report, table(report))
    for name, calls in groups:
        entries: list[dict[str, Any]] = []
        report["cases"].append({"name": name, "calls": entries})
        for call in calls():
            seen.add(call.spec.op)
            if settings.ops and call.spec.op not in settings.ops:
                continue
            if clock.over():
                report["skipped"].append(f"{name}: {call.spec.op} {call}")
                continue
            measure_call(call, settings.seconds)
            _add_ceilings(call, copies, product)
            entries.append(_entry(call))
            say(f"{name}: {call.spec.op} {call}: {_said(call)}")
        entries.sort(key=_weight)
        report["no_case"] = sorted(NATIVE_OPS - seen)
        path = write(report, table(report))
    return report, path


def failed(report: dict[str, Any]) -> bool:
    """Whether a kernel or a body failed."""
    return any(
        "error" in result
        for group in report["cases"]
        for call in group["calls"]
        for result in call["results"]
    )


def _add_ceilings(call: Call, copies: dict[int, float], product: float) -> None:
    for result in call.results:
        if "error" not in result:
            result["of_ceiling"] = (
                result["flops_per_s"] / (1e9 * product)
                if result["flops"]
                else result["bytes_per_s"] / ceiling(copies, result["bytes"])
            )


def _entry(call: Call) -> dict[str, Any]:
    return {
        "op": call.spec.op, "operands": str(call), "attrs": repr(call.spec.attrs),
        "in_place": call.shares, "origin": call.origin, "count": call.count,
        "results": call.results,
    }  # fmt: skip


def _said(call: Call) -> str:
    return ", ".join(
        f"{r['kernel']} " + ("failed" if "error" in r else f"{1e3 * r['best']:.3g} ms")
        for r in call.results
    )


def _weight(entry: dict[str, Any]) -> tuple[bool, float]:
    """What the step spends most time on comes first; calls outside the step come last."""
    return not entry["count"], -seconds(entry)
