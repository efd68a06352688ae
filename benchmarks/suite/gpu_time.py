"""The time of a step on a GPU, without one: eager PyTorch's beside the plan of Onward's.

Both are what `onward.explain(..., gpu=...)` says. Where a case was measured on a GPU, it is
predicted for that GPU, and the measured seconds stand beside the predicted ones.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from suite.cases import Case
from suite.cli import RESULTS
from suite.gpu_memory import measured_cases, planned
from suite.progress import say
from suite.report import Writer, heading, markdown, started
from suite.workloads import described

GPU = "H100"  # of cases that were not measured
HEAD = [
    "case",
    "GPU",
    "eager: device",
    "host",
    "step",
    "measured",
    "apart",
    "Onward: device",
    "measured",
    "times as fast",
]
ABOUT = (
    "Milliseconds of a step. Eager PyTorch: each operator by its FLOPs, its bytes and a gap to the "
    "next one, on the device; operators by their number, on the host; a step takes the larger. "
    "Onward: the launches of the plan, which are CUDA graphs; a step of less than 5 ms on the "
    "device is not predicted, since the host limits it. Measured: gpu-DATE.md. The constants were "
    "fitted to eager's measured rows, so that the errors are not those for another model. BERT's "
    "step of Onward was measured before it was recorded, and Onward's of 2026-11-23 before its "
    "fused kernels."
)


def run(cases: Sequence[Case], write: Writer) -> tuple[dict[str, Any], Path]:
    """The report on these cases, and where it was written; it is written after each."""
    report = started("Time of training steps on one GPU, predicted without it") | {"cases": []}
    path = write(report, table(report))
    for case in cases:
        rows = measured(case, RESULTS) or [{"gpu": GPU, "date": "", "seconds": {}}]
        for row in rows:
            report["cases"].append(described(case) | row | predicted(case, row["gpu"]))
            path = write(report, table(report))
            say(" | ".join(_cells(report["cases"][-1])))
    return report, path


def predicted(case: Case, gpu: str) -> dict[str, Any]:
    """What is predicted of a case's step on a GPU, as `GpuTime.as_dict` has it."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.precision == "tf32" else "highest")
    try:
        time = planned(case, gpu).time
    finally:
        torch.set_float32_matmul_precision(before)
    gc.collect()
    return {"predicted": time.as_dict()}


def measured(case: Case, folder: Path) -> list[dict[str, Any]]:
    """The seconds of the case's steps by engine, with GPU and date, as the GPUs' results in the
    folder have them."""
    found: list[dict[str, Any]] = []
    for other, gpu, date in measured_cases(folder):
        engines, mine = other["engines"], {**asdict(case), "about": other["case"]["about"]}
        if all(mine[name] == value for name, value in other["case"].items()):
            seconds = {n: e["step_s"] for n, e in engines.items() if "step_s" in e}
            found.append({"gpu": gpu, "date": date, "seconds": seconds})
    return found


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    rows = [_cells(case) for case in report["cases"]]
    return "\n".join([*heading(report), "", ABOUT, "", *markdown(HEAD, rows, 2), ""])


def _cells(case: Mapping[str, Any]) -> list[str]:
    time, known = case["predicted"], case["seconds"]
    if time["reason"]:
        return [case["name"], case["gpu"], time["reason"]]

    def total(found: Mapping[str, float] | None) -> float | None:
        return None if found is None else sum(found[k] for k in ("products", "attention", "memory"))

    eager, there = time["eager_step"], known.get("eager")
    onward = total(time["onward"])
    return [
        f"{case['name']}, {case['batch']} x {case['tokens']}",
        case["gpu"],
        _ms(total(time["eager"])), _ms(time["eager_host"]), _ms(eager),
        f"{_ms(there)} ({case['date']})" if there else "",
        f"{eager / there - 1:+.0%}" if eager and there else "",
        _ms(onward), _ms(known.get("onward")),
        f"{time['speedup']:.2f}x" if time["speedup"] else "",
    ]  # fmt: skip


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"
