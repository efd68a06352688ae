"""The memory of a step on a GPU, without one: eager PyTorch's beside the plan of Onward's.

Eager's is that of `eager_memory.py`. Onward's is what `onward.explain(..., gpu=...)` says. Where a
case was measured on a GPU, the measured bytes stand beside both.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from suite.cases import Case
from suite.cli import RESULTS
from suite.eager_memory import eager_memory
from suite.engines import LEARNING_RATE
from suite.progress import say
from suite.report import MIB, Writer, heading, markdown, started
from suite.workloads import described, make_batches, make_model

GPU = "H100"
LIMIT, QUICK_LIMIT = 32 * 10**9, 10**8  # bytes of the device
TRIES = 8  # batches that eager's search looks at


def run(cases: Sequence[Case], write: Writer, limit: int) -> tuple[dict[str, Any], Path]:
    """The report on these cases, and where it was written; it is written after each."""
    report = started(f"Memory of training steps on one {GPU}, predicted without it")
    report |= {"gpu": GPU, "limit": limit, "cases": []}
    largest: dict[Case, dict[str, Any]] = {}
    path = write(report, table(report))
    for case in cases:
        alone = replace(case, name="", batch=1)
        found = predicted(case, None if alone in largest else limit)
        found["largest"] = largest.setdefault(alone, found["largest"])
        found["measured"] = measured(case, RESULTS)
        report["cases"].append(described(case) | found)
        path = write(report, table(report))
        say(row(report["cases"][-1]))
    return report, path


def predicted(case: Case, limit: int | None) -> dict[str, Any]:
    """Bytes of a step by engine: all that it holds, and what it holds above model and batch. limit:
    also the largest batches within so many bytes."""
    eager = eager_memory(case)
    found: dict[str, Any] = {
        "held": eager.held, "eager": eager.step,
        "largest": dict.fromkeys(("eager", "onward", "budget")),
    }  # fmt: skip
    plan = planned(case, GPU, limit)
    found["onward"] = plan.memory.total - plan.memory.kinds["weights"]
    found["kinds"] = dict(plan.memory.kinds)
    if limit is not None:
        assert plan.largest is not None
        found["largest"]["onward"] = plan.largest.batch_size
        budget = limit - plan.memory.kinds["weights"]
        again = planned(case, GPU, limit, budget)
        found["largest"]["budget"] = again.largest.batch_size
        of_batch = cache(lambda n: eager_memory(replace(case, batch=n)).peak)
        found["largest"]["eager"] = largest_within(of_batch, limit, case.batch, eager.peak)
    gc.collect()
    return found


def planned(case: Case, gpu: str, limit: int | None = None, budget: int | None = None) -> Any:
    """Onward's explanation of the case's step on a GPU. limit: bytes, for the largest batch.
    budget: `memory_budget` of its Trainer,
    within which values are computed again."""
    import torch

    import onward

    model, batch = make_model(case), make_batches(case, 1)[0]
    options: dict[str, Any] = {"memory_budget": budget}
    options["mixed_precision"] = "bf16" if case.precision == "bf16" else "no"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    trainer = onward.Trainer(model, optimizer, options=options)
    return onward.explain(trainer, batch, gpu=gpu, memory=limit)


def largest_within(peak: Callable[[int], int], limit: int, start: int, at_start: int) -> int:
    """The largest batch whose peak is within the limit; 0 where one sample is too many. peak: by
    batch, nearly linear."""
    known = {start: at_start}
    fits, beyond = 0, 1 << 24
    n = start
    for _ in range(TRIES):
        if n not in known:
            known[n] = peak(n)
        if known[n] <= limit:
            fits = max(fits, n)
        else:
            beyond = min(beyond, n)
        if beyond - fits <= 1:
            break
        low, high = min(known), max(known)
        slope = (known[high] - known[low]) / (high - low) if high > low else 0.0
        near = fits or beyond
        guess = near + int((limit - known[near]) // slope) if slope else 2 * start
        n = min(max(guess, fits + 1), beyond - 1)
    return fits


def measured(case: Case, folder: Path) -> dict[str, tuple[int, str]]:
    """Bytes of a step above model and batch by engine, and the date, as a GPU's results in the
    folder have them; those of the last date count."""
    found: dict[str, tuple[int, str]] = {}
    for other, _, date in measured_cases(folder):
        if not _alike(other["case"], asdict(case)):
            continue
        for name, engine in other["engines"].items():
            if "peak_step_bytes" in engine:
                found[name] = engine["peak_step_bytes"], date
    return found


def measured_cases(folder: Path) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Each case that was measured on a GPU, with that GPU and the date, oldest first."""
    for file in sorted(folder.glob("gpu-2*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        for case in report["cases"]:
            yield case, report["machine"]["gpu"].split()[1], file.stem.removeprefix("gpu-")


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    # TF32 changes no tensor's size
    precisions = {str(x["precision"]).replace("tf32", "fp32") for x in (one, other)}
    names = ("model", "batch", "tokens", "dropout", "size")
    return len(precisions) == 1 and all(one[name] == other[name] for name in names)


def row(case: Mapping[str, Any]) -> str:
    return " | ".join(_cells(case))


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    head = [
        "case",
        "eager",
        "measured",
        "Onward",
        "measured",
        "Onward's share",
        f"batch in {report['limit'] / 1e9:.0f} GB: eager",
        "Onward",
        "times",
        "recomputing",
    ]
    about = (
        "MiB of a step above the model and the batch: gradients, the optimizer's state, "
        "activations. Eager: torch's memory tracker under fake tensors, operators as CUDA's, fused "
        "AdamW. Onward: the plan for the GPU, which is not here. Measured: on an H100 or H200 "
        "(gpu-DATE.md), Onward's of before 2026-11-27 without its kernels of today. The largest "
        "batches are of the whole step: model and batch too. Recomputing: with memory_budget, by "
        "which Onward computes values again that do not fit."
    )
    rows = [_cells(case) for case in report["cases"]]
    return "\n".join([*heading(report), "", about, "", *markdown(head, rows), ""])


def _cells(case: Mapping[str, Any]) -> list[str]:
    def seen(name: str) -> str:
        nbytes, date = case["measured"].get(name, (0, ""))
        return f"{nbytes / MIB:.0f} ({date})" if nbytes else ""

    most = case["largest"]
    eager, onward = most["eager"], most["onward"]
    return [
        f"{case['name']}, {case['batch']} x {case['tokens']}",
        f"{case['eager'] / MIB:.0f}", seen("eager"), f"{case['onward'] / MIB:.0f}", seen("onward"),
        f"{case['onward'] / case['eager']:.2f}",
        str(eager or ""), str(onward or ""), f"{onward / eager:.1f}x" if eager and onward else "",
        str(most["budget"] or ""),
    ]  # fmt: skip
