"""The parts of the padded benchmark, each a function of a run."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import onward
from suite.batches import shares
from suite.cases import STEPS
from suite.losses import Tolerance, compare, exact_in, failed, wrong
from suite.measurement import Effort, measure
from suite.passes import ROW_DEMAND
from suite.progress import say
from suite.remote import processes
from suite.row_engines import WITHOUT
from suite.row_report import notes
from suite.row_run import Run, measured
from suite.row_trace import traced
from suite.workloads import described, make_batches, make_model

GRID_REAL, GRID_LABELLED = (1.0, 0.75, 0.46, 0.25), (1.0, 0.5, 0.15)


def picture(run: Run) -> None:
    """What the pass does with the first batch of each workload, as text and as a picture."""
    for case in run.cases:
        model = make_model(case)
        trainer = onward.Trainer(model, onward.optim.AdamW(lr=5e-5))
        found = trainer.explain(make_batches(case, 1)[0]).rows
        assert found is not None, "the benchmark's models are captured"
        run.writer.folder.mkdir(parents=True, exist_ok=True)
        found.save(run.writer.folder / f"row_demand-{case.model}.svg")
        run.report["pictures"].append({"case": case.name, "text": str(found)})
    run.write()


def headline(run: Run) -> None:
    """Every engine on every workload."""
    for case in run.cases:
        if run.clock.over():
            run.skip(f"headline, {case.name}")
            continue
        effort = Effort(
            rounds=run.rounds or (2 if run.quick else 5),
            steps=run.steps or STEPS[case.model],
            warmup=2,
            exact_steps=3,
            tolerance=Tolerance(
                level=run.level(case),
                **{"exact": 1e-5, "relative": True, **exact_in(case.precision)},
            ),
        )
        chosen = dict(run.engines)
        if case.model != "bert_padded":
            chosen.pop("eager-labels", None)  # nothing is labelled
        found = measured(run, case, chosen, effort)
        found["notes"] = notes(found)
        run.report["cases"].append(found)
        run.write()


def full(run: Run) -> None:
    """Onward with and without the pass where every row is real and labelled, or read."""
    chosen = run.chosen("onward", WITHOUT)
    if len(chosen) < 2:
        run.skip("full", f"needs Onward with and without pass {ROW_DEMAND}")
        return
    for case in run.cases:
        if run.clock.over():
            run.skip(f"full, {case.name}")
            continue
        case = replace(case, name=case.name.replace("padded", "full"), real=1.0, labelled=1.0)
        effort = Effort(
            rounds=4 * run.rounds or (4 if run.quick else 20),
            steps=run.steps or STEPS[case.model],
            warmup=2,
            tolerance=Tolerance(level=1.0),  # losses are compared one by one
            alternate=True,
        )
        found = measured(run, case, chosen, effort)
        found["overhead"] = _overhead(found["engines"]["onward"], found["engines"][WITHOUT])
        run.report["full"].append(found)
        run.write()


def paired(run: Run) -> None:
    """Compare a step with and without row demand, in turn within one process: two processes differ
    by a percent of their own, depending on where their memory lies."""
    for case in run.cases:
        if run.clock.over():
            run.skip(f"paired, {case.name}")
            continue
        case = replace(case, name=case.name.replace("padded", "full"), real=1.0, labelled=1.0)
        batches, model = make_batches(case, 2), make_model(case)
        trainers = [
            onward.Trainer(
                copy.deepcopy(model), onward.optim.AdamW(lr=5e-5),
                options=onward.TrainerOptions(seed=1, disable=off),
            )
            for off in ((), (ROW_DEMAND,))
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
    """Measure the speed over shares of real tokens and shares of labels."""
    real, labelled = ((1.0, 0.46), (1.0, 0.15)) if run.quick else (GRID_REAL, GRID_LABELLED)
    base = next((case for case in run.cases if case.model == "bert_padded"), None)
    if base is None:
        run.skip("grid", "is for the BERT workload")
        return
    effort = Effort(
        rounds=run.rounds or 2,
        steps=run.steps or 2,
        warmup=1,
        tolerance=Tolerance(level=run.level(base), **exact_in(base.precision)),
        keep=True,
    )
    with processes(run.chosen("eager", "compile", "onward"), "cpu", run.threads) as remotes:
        for case in (
            replace(base, name=f"{r:.0%} real, {s:.0%} labelled", real=r, labelled=s)
            for r in real
            for s in labelled
        ):
            if run.clock.over():
                run.skip(f"grid, {case.name}")
                continue
            found = measure(case, remotes, effort, run.clock.left)
            found["rows"] = shares(make_batches(case, effort.batches))
            run.report["grid"].append(found)
            run.write()


def varying(run: Run) -> None:
    """Onward alone on batches of many sizes, step by step."""
    for case in run.cases:
        if case.model != "bert_padded":
            continue
        case = replace(case, name=case.name.replace("padded", "cut to the longest"), fit=True)
        count = 10 if run.quick else 100
        found: dict[str, Any] = {"case": described(case), "engines": {}}
        batches = make_batches(case, count)
        found["rows"] = shares(batches)
        for name, engine in run.chosen("onward", WITHOUT).items():
            if run.clock.over():
                run.skip(f"varying, {name}")
                continue
            say(f"{case.name}: {name}: {count} batches")
            found["engines"][name] = traced(run, case, engine, batches)
        if WITHOUT in found["engines"] and "onward" in found["engines"]:
            compare(found["engines"]["onward"], found["engines"][WITHOUT])
        run.report["varying"].append(found)
        run.write()


def _overhead(entry: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
    """Step time with the pass over that without it, from the medians of the rounds."""
    turns = zip(entry["seconds"], base["seconds"], strict=False)
    ratios = [statistics.median(a) / statistics.median(b) for a, b in turns]
    if len(ratios) < 2:
        return {}
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "rounds": len(ratios), "median": middle, "quartile_low": low, "quartile_high": high,
        "least": min(ratios), "most": max(ratios),
    }  # fmt: skip


PARTS: Mapping[str, Callable[[Run], None]] = {
    part.__name__: part for part in (picture, headline, full, paired, grid, varying)
}


def any_wrong(report: Mapping[str, Any]) -> bool:
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
