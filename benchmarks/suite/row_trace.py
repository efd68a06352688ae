"""One engine over batches of many sizes, step by step: what planning for new ones costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from suite.batches import Batch
from suite.cases import Case
from suite.engines import Engine
from suite.remote import EngineError, processes
from suite.row_run import Run


def traced(run: Run, case: Case, engine: Engine, batches: Sequence[Batch]) -> dict[str, Any]:
    """One engine over all batches: of each step its size, time, compile time and memory."""
    entry: dict[str, Any] = {"about": engine.about, "steps": [], "losses": []}
    with processes({engine.name: engine}, "cpu", run.threads) as remotes:
        remote = remotes[engine.name]
        try:
            answer = remote.ask("prepare", case, len(batches), timeout=run.clock.left())
            entry["first_loss"] = answer["first_loss"]
            seconds, taken = answer["first_step_s"], 0.0
            for place, batch in enumerate(batches):
                if place:
                    answer = remote.ask("run", place, 1, timeout=run.clock.left())
                    (seconds,) = answer["seconds"]
                    entry["losses"] += answer["losses"]
                    entry["peak_step_bytes"] = answer["peak_step_bytes"]
                said = remote.ask("look", timeout=run.clock.left())
                total = sum(said["compile_seconds"].values())
                # The trainer speaks of its last graph: a smaller sum is that of a new one.
                more, taken = total - taken if total >= taken else total, total
                entry["steps"].append(
                    {
                        "tokens": batch["input_ids"].shape[1],
                        "real": int(batch["attention_mask"].sum()),
                        "labelled": int((batch["labels"] >= 0).sum()),
                        "seconds": seconds,
                        "compile_s": more,
                        "resident_bytes": said["resident_bytes"],
                        "arena_bytes": said["arena_bytes"],
                        "predicted_peak_bytes": said["predicted_peak_bytes"],
                    }
                )
        except EngineError as error:
            entry["error"] = str(error)
    if len(entry["steps"]) > 1:
        entry["summary"] = _summary(entry["steps"], case.batch)
    if not all(math.isfinite(loss) for loss in entry["losses"]):
        entry["error"] = "a loss is not finite"
    return entry


def _summary(steps: Sequence[Mapping[str, Any]], batch: int) -> dict[str, Any]:
    """What a run of many sizes comes to; the first step, with its capture, is told apart."""
    later = steps[1:]
    planned = [step for step in later if step["compile_s"] > 0]
    known = [step for step in later if not step["compile_s"] > 0]
    run_s = sum(step["seconds"] for step in later)
    compile_s = sum(step["compile_s"] for step in later)
    largest = max(
        range(len(steps)), key=lambda i: (steps[i]["tokens"], steps[i]["real"], -i)
    )  # fmt: skip
    grown = [i for i in range(1, len(steps)) if _arena(steps, i) > _arena(steps, i - 1)]
    return {
        "steps": len(steps),
        "sizes": len({step["tokens"] for step in steps}),
        "plans": 1 + len(planned),
        "first_step_s": steps[0]["seconds"],
        "first_compile_s": steps[0]["compile_s"],
        "later_s": run_s,
        "later_compile_s": compile_s,
        "compile_share": compile_s / run_s,
        "planned_step_s": _median([step["seconds"] for step in planned]),
        "planned_step_compile_s": _median([step["compile_s"] for step in planned]),
        "known_step_s": _median([step["seconds"] for step in known]),
        # Sizes differ from step to step: time without planning, per position of the batch.
        "s_per_token": sum(s["seconds"] - s["compile_s"] for s in later)
        / sum(batch * s["tokens"] for s in later),
        "largest_at": largest,
        "resident_growth_bytes": steps[-1]["resident_bytes"] - steps[largest]["resident_bytes"],
        "resident_bytes": steps[-1]["resident_bytes"],
        "arena_bytes": _arena(steps, -1),
        "arena_growth_bytes": _arena(steps, -1) - _arena(steps, largest),
        "arena_last_grown_at": grown[-1] if grown else 0,
    }


def _arena(steps: Sequence[Mapping[str, Any]], place: int) -> int:
    return steps[place]["arena_bytes"]


def _median(numbers: Sequence[float]) -> float | None:
    return statistics.median(numbers) if numbers else None
