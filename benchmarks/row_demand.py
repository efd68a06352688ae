"""What padded and sparsely labelled training costs on this CPU, with and without `row_demand`.

    python benchmarks/row_demand.py                    # some 40 minutes on two cores
    python benchmarks/row_demand.py --quick --out DIR  # tiny models: does the script work?

Two workloads, both with real varying lengths: a BERT whose batches are 46 % real tokens, 15 % of
those labelled; and two BERT towers with 45 % real tokens. Parts:

picture: which rows of which layer the first batch of each needs (`Trainer.explain`).
headline: every engine on both, among them two that do by hand what the pass does (by_hand.py).
full: no padding, every row labelled or read: what the pass costs where it can spare nothing.
paired: the same within one process, step by step.
grid: Onward, eager and torch.compile over shares of real tokens and shares of labels. An engine
    keeps its model over the grid, and with it what it compiled.
varying: 100 batches, each cut to its longest sequence: what planning for ever new sizes costs.

As in cpu.py each engine has its own process and all take turns over the same batches. Without
dropout losses are eager's within 1e-5 relative; with dropout the mean is close, and Onward's losses
with and without the pass agree within 1e-4, as its masks depend on logical coordinates only. Exit
status 1: an engine failed or losses disagree. Results are written after every case.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import by_hand
import onward
from ablation import compare, wrong
from harness import ENGINES, Effort, Engine, EngineError, measure, processes, say
from report import (
    command,
    failed,
    machine,
    write,
)
from row_tables import PASS, WITHOUT, notes, table
from workloads import MODELS, Batch, Case, make_batches, make_model, shares

FULL = (
    Case("BERT MLM, padded", "bert_padded", batch=16, tokens=128, real=0.46, labelled=0.15),
    Case("two towers, padded", "two_tower_padded", batch=64, tokens=64, real=0.45),
)
# Of the mean loss. Few pairs and a low temperature: dropout moves the towers' loss more.
LEVEL = {"bert_padded": 0.02, "two_tower_padded": 0.08}
STEPS = {"bert_padded": 3, "two_tower_padded": 5}  # per round
GRID_REAL, GRID_LABELLED = (1.0, 0.75, 0.46, 0.25), (1.0, 0.5, 0.15)
PARTS = ("picture", "headline", "full", "paired", "grid", "varying")


def engines() -> dict[str, Engine]:
    """All engines."""
    tuned = ENGINES["eager-tuned"]
    found = {name: engine for name, engine in ENGINES.items() if not engine.onward}
    for name, about, change in (
        ("eager-labels", "eager-tuned, head on labelled rows only", by_hand.labelled_rows),
        ("eager-unpad", "eager-tuned, no padding outside attention's scores", by_hand.real_rows),
    ):
        found[name] = replace(tuned, name=name, about=about, change=change)
    found["onward"] = replace(ENGINES["onward"], seed=0)
    about = f"Onward without pass {PASS}"
    found[WITHOUT] = replace(found["onward"], name=WITHOUT, about=about, disable=(PASS,))
    return found


@dataclass
class Run:
    """One call of the script: what is measured with what effort, and where it is written."""

    engines: Mapping[str, Engine]
    report: dict[str, Any]
    folder: Path
    deadline: float
    quick: bool = False
    rounds: int = 0
    steps: int = 0
    threads: int = 0
    cases: Sequence[Case] = field(default_factory=tuple)

    def left(self) -> float:
        """Seconds until nothing new starts."""
        return self.deadline - time.monotonic()

    def chosen(self, *names: str) -> dict[str, Engine]:
        """Those of these engines that were asked for and exist."""
        return {name: self.engines[name] for name in names if name in self.engines}

    def write(self) -> Path:
        """Write what is known by now."""
        stem = "row_demand-quick" if self.quick else "row_demand"
        if not self.report["cases"] and self.report["paired"]:
            stem += "-paired"  # that part alone
        return write(self.report, self.folder, stem, table(self.report))

    def skip(self, what: str, why: str = "out of time") -> None:
        """Say that something was not measured."""
        self.report["skipped"].append(f"{what} ({why})")
        say(f"{what}: not run, {why}")


# ---- the parts


def picture(run: Run) -> None:
    """What the pass does with the first batch of each workload, as text and as a picture."""
    for case in run.cases:
        model = make_model(case)
        trainer = onward.Trainer(model, onward.optim.AdamW(lr=5e-5))
        found = trainer.explain(make_batches(case, 1)[0])
        run.folder.mkdir(parents=True, exist_ok=True)
        found.save(run.folder / f"row_demand-{case.model}.svg")
        run.report["pictures"].append({"case": case.name, "text": str(found)})
    run.write()


def headline(run: Run) -> None:
    """Every engine on every workload."""
    for case in run.cases:
        if run.left() < 0:
            run.skip(f"headline, {case.name}")
            continue
        effort = Effort(
            rounds=run.rounds or (2 if run.quick else 5),
            steps=run.steps or STEPS[case.model],
            warmup=2,
            exact_steps=3,
            level_tolerance=LEVEL[case.model] * (3 if run.quick else 1),
            exact_tolerance=1e-5,
            relative=True,
        )
        chosen = dict(run.engines)
        if case.model != "bert_padded":
            chosen.pop("eager-labels", None)  # nothing is labelled
        found = _measured(run, case, chosen, effort)
        found["notes"] = notes(found)
        run.report["cases"].append(found)
        run.write()


def full(run: Run) -> None:
    """Onward with and without the pass where every row is real and labelled, or read."""
    chosen = run.chosen("onward", WITHOUT)
    if len(chosen) < 2:
        run.skip("full", f"needs Onward with and without pass {PASS}")
        return
    for case in run.cases:
        if run.left() < 0:
            run.skip(f"full, {case.name}")
            continue
        case = replace(case, name=case.name.replace("padded", "full"), real=1.0, labelled=1.0)
        effort = Effort(
            rounds=4 * run.rounds or (4 if run.quick else 20),
            steps=run.steps or STEPS[case.model],
            warmup=2,
            exact_steps=0,
            level_tolerance=1.0,  # losses are compared one by one
            alternate=True,
        )
        found = _measured(run, case, chosen, effort)
        found["overhead"] = _overhead(found["engines"]["onward"], found["engines"][WITHOUT])
        run.report["full"].append(found)
        run.write()


def paired(run: Run) -> None:
    """The same in one process, step by step: two processes differ by a percent as it is, by where
    their memory lies."""
    for case in run.cases:
        if run.left() < 0:
            run.skip(f"paired, {case.name}")
            continue
        case = replace(case, name=case.name.replace("padded", "full"), real=1.0, labelled=1.0)
        batches, model = make_batches(case, 2), make_model(case)
        trainers = [
            onward.Trainer(
                copy.deepcopy(model), onward.optim.AdamW(lr=5e-5),
                options=onward.TrainerOptions(seed=1, disable=off),
            )
            for off in ((), (PASS,))
        ]  # fmt: skip
        for trainer in trainers:
            for batch in batches:
                trainer.train_step(batch)
        seconds: list[list[float]] = [[], []]
        for turn in range(4 * (run.rounds or 5)):
            for batch in batches:
                for i in (0, 1) if turn % 2 else (1, 0):
                    start = time.perf_counter()
                    trainers[i].train_step(batch)
                    seconds[i].append(time.perf_counter() - start)
        ratios = [a / b for a, b in zip(*seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        run.report["paired"].append(
            {"case": case.name, "steps": len(ratios), "median": middle, "quartile_low": low,
             "quartile_high": high, "with_s": statistics.median(seconds[0]),
             "without_s": statistics.median(seconds[1])}
        )  # fmt: skip
        run.write()


def grid(run: Run) -> None:
    """Speed over shares of real tokens and shares of labels."""
    real, labelled = ((1.0, 0.46), (1.0, 0.15)) if run.quick else (GRID_REAL, GRID_LABELLED)
    base = next((case for case in run.cases if case.model == "bert_padded"), None)
    if base is None:
        run.skip("grid", "is for the BERT workload")
        return
    effort = Effort(
        rounds=run.rounds or 2,
        steps=run.steps or 2,
        warmup=1,
        exact_steps=0,
        level_tolerance=LEVEL[base.model] * (3 if run.quick else 1),
        keep=True,
    )
    with processes(run.chosen("eager", "compile", "onward"), "cpu", run.threads) as remotes:
        for case in (
            replace(base, name=f"{r:.0%} real, {s:.0%} labelled", real=r, labelled=s)
            for r in real
            for s in labelled
        ):
            if run.left() < 0:
                run.skip(f"grid, {case.name}")
                continue
            found = measure(case, remotes, effort, run.left)
            found["rows"] = _rows(case, effort.batches)
            run.report["grid"].append(found)
            run.write()


def varying(run: Run) -> None:
    """Onward alone on batches of many sizes, step by step."""
    for case in run.cases:
        if case.model != "bert_padded":
            continue
        case = replace(case, name=case.name.replace("padded", "cut to the longest"), fit=True)
        count = 20 if run.quick else 100
        found: dict[str, Any] = {
            "case": asdict(case) | {"about": MODELS[case.model].about}, "engines": {},
        }  # fmt: skip
        batches = make_batches(case, count)
        found["rows"] = shares(batches)
        for name, engine in run.chosen("onward", WITHOUT).items():
            if run.left() < 0:
                run.skip(f"varying, {name}")
                continue
            say(f"{case.name}: {name}: {count} batches")
            found["engines"][name] = _traced(run, case, engine, batches)
        if WITHOUT in found["engines"] and "onward" in found["engines"]:
            compare(found["engines"]["onward"], found["engines"][WITHOUT])
        run.report["varying"].append(found)
        run.write()


# ---- measuring


def _measured(run: Run, case: Case, chosen: Mapping[str, Engine], effort: Effort) -> dict[str, Any]:
    """One case, with its shares; Onward's losses beside those without the pass."""
    with processes(chosen, "cpu", run.threads) as remotes:
        found = measure(case, remotes, effort, run.left)
    found["settings"] = {"steps": effort.steps, "rounds": found["rounds"], "warmup": effort.warmup}
    found["rows"] = _rows(case, effort.batches)
    entries = found["engines"]
    for entry in entries.values():
        flat = [seconds for turn in entry["seconds"] for seconds in turn]
        if flat:
            entry["mean_step_s"] = statistics.fmean(flat)
    if WITHOUT in entries and "onward" in entries:
        compare(entries["onward"], entries[WITHOUT])
    return found


def _rows(case: Case, count: int) -> dict[str, list[float]]:
    return shares(make_batches(case, count))


def _overhead(entry: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
    """The pass's time as a multiple of that without it, from the rounds' medians."""
    turns = zip(entry["seconds"], base["seconds"], strict=False)
    ratios = [statistics.median(a) / statistics.median(b) for a, b in turns]
    if len(ratios) < 2:
        return {}
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "rounds": len(ratios), "median": middle, "quartile_low": low, "quartile_high": high,
        "least": min(ratios), "most": max(ratios),
    }  # fmt: skip


def _traced(run: Run, case: Case, engine: Engine, batches: Sequence[Batch]) -> dict[str, Any]:
    """One engine over all batches: of each step its size, time, compile time and memory."""
    entry: dict[str, Any] = {"about": engine.about, "steps": [], "losses": []}
    with processes({engine.name: engine}, "cpu", run.threads) as remotes:
        remote = remotes[engine.name]
        try:
            answer = remote.ask("prepare", case, len(batches), timeout=run.left())
            entry["first_loss"] = answer["first_loss"]
            seconds, taken = answer["first_step_s"], 0.0
            for place, batch in enumerate(batches):
                if place:
                    answer = remote.ask("run", place, 1, timeout=run.left())
                    (seconds,) = answer["seconds"]
                    entry["losses"] += answer["losses"]
                    entry["peak_step_bytes"] = answer["peak_step_bytes"]
                said = remote.ask("look", timeout=run.left())
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


def _any_wrong(report: Mapping[str, Any]) -> bool:
    """Whether an engine failed or losses disagree anywhere."""
    pairs = [*report["cases"], *report["full"], *report["varying"]]
    differ = any(
        wrong(found["engines"]["onward"])
        for found in pairs
        if {"onward", WITHOUT} <= set(found["engines"])
    )
    stopped = any("error" in e for found in report["varying"] for e in found["engines"].values())
    measured = [*report["cases"], *report["full"], *report["grid"]]
    return differ or stopped or failed(measured)


def main() -> int:
    """Run the benchmark; see the module's text."""
    every = engines()
    parts: dict[str, Callable[[Run], None]] = dict(
        zip(PARTS, (picture, headline, full, paired, grid, varying), strict=True)
    )
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="comma-separated; default: %(default)s"
    )
    parser.add_argument(
        "--engines", default=",".join(every), help="comma-separated; default: %(default)s"
    )
    parser.add_argument("--cases", default="", help="only workloads whose name contains this")
    parser.add_argument(
        "--rounds", type=int, default=0, help="turns of each engine; 4 times as many in part full"
    )
    parser.add_argument("--steps", type=int, default=0, help="timed steps per round and engine")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; default: torch's")
    parser.add_argument("--budget", type=float, default=3000.0, help="seconds; then nothing starts")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    for asked, there in ((options.parts, PARTS), (options.engines, every)):
        if unknown := sorted(set(asked.split(",")) - set(there)):
            parser.error(f"no such name: {', '.join(unknown)}; there are {', '.join(there)}")

    asked_for = options.engines.split(",")
    run = Run(
        engines={name: engine for name, engine in every.items() if name in asked_for},
        report={
            "title": "Padded and sparsely labelled training on the CPU",
            "command": command(),
            "machine": machine("cpu", options.threads),
            "pictures": [], "cases": [], "full": [], "paired": [], "grid": [], "varying": [],
            "skipped": [],
        },
        folder=options.out,
        deadline=time.monotonic() + options.budget,
        quick=options.quick,
        rounds=options.rounds,
        steps=options.steps,
        threads=options.threads,
        cases=[
            _tiny(case) if options.quick else case for case in FULL if options.cases in case.name
        ],
    )  # fmt: skip
    for name in options.parts.split(","):
        parts[name](run)
    path = run.write()
    say(f"\n{table(run.report)}\nwritten: {path}, {options.budget - run.left():.0f} s")
    return int(_any_wrong(run.report))


def _tiny(case: Case) -> Case:
    batch = 16 if case.model == "two_tower_padded" else 4  # few pairs make a loss that jumps
    return replace(case, size="tiny", batch=batch, tokens=32)


if __name__ == "__main__":
    sys.exit(main())
