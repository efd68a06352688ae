"""Engines that train on several ranks, in turn, and what each takes."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from suite import twin_bert
from suite.progress import say
from suite.question import QuestionError, ask
from suite.rank_engines import MODES
from suite.report import MIB, Writer, heading, markdown, one_line, started

ENGINES = {
    "ddp": "DistributedDataParallel, gradients as views of its buckets, fused AdamW",
    "onward": "a Trainer, `mesh` along dp_replicate",
    "ddp-zero": "the first with torch's ZeroRedundancyOptimizer around the fused AdamW",
    "fsdp2": "`fully_shard` of each block and of the whole, fused AdamW: weights are cut too",
    "deepspeed-1": "DeepSpeed, ZeRO stage 1, fused AdamW, where it is installed",
    "deepspeed-2": "DeepSpeed, ZeRO stage 2: gradients are cut too",
    "deepspeed-3": "DeepSpeed, ZeRO stage 3: weights are cut too",
    "onward-zero": "a Trainer, `mesh` along dp_shard, `zero=1`",
    "onward-zero2": "a Trainer, `mesh` along dp_shard, `zero=2`: sums of gradients are cut too",
    "onward-zero3": "a Trainer, `mesh` along dp_shard, `zero=3`: weights are cut too",
    "onward-deepspeed-1": "DeepSpeed, ZeRO stage 1, around the model of `onward.accelerate`",
    "onward-tp": "a Trainer, `mesh` along tp: each rank has the batch of all, and parts of weights",
    "onward-pp": "a Trainer, `mesh` along pp: each rank has the batch of all, and some layers",
}
SIZE = {"n_layer": 6, "n_embd": 768, "n_head": 12, "vocab_size": 8000, "n_positions": 256}
QUICK = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 32}
LEVEL = 1e-4  # relative distance of losses, which are all of fp32 and without dropout


# by model: its name, sizes whole and quick, rows of a rank, length whole and quick
MODELS: dict[str, tuple[str, dict[str, int], dict[str, int], int, int, int]] = {
    "gpt2": ("GPT-2", SIZE, QUICK, 2, 128, 16),
    "twin bert": ("TwinBERT", twin_bert.LARGE, twin_bert.TINY, 16, 64, 8),
}


def run(
    options: argparse.Namespace, write: Writer, model: str = "gpt2"
) -> tuple[dict[str, Any], Path]:
    """The report: for each engine the seconds of every step, memory by rank, losses, bytes."""
    ranks, quick = options.ranks, options.quick
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    report = started(f"Training on {ranks} ranks over Gloo", threads=threads)
    _, whole, small, rows, length, short = MODELS[model]
    report |= {"model": model, "ranks": ranks, "size": small if quick else whole, "rows": rows}
    report |= {"length": short if quick else length, "engines": {}, "agree": True}
    request = {key: report[key] for key in ("model", "ranks", "size", "rows", "length")}
    request |= {"threads": threads, "warmup": 6, "steps": options.steps or (2 if quick else 8)}
    if find_spec("deepspeed") is None:
        left = [name for name in options.engines if "deepspeed" in name]
        options.engines = [name for name in options.engines if name not in left]
        report["left_out"] = left
    path = Path()
    for engine in (name for name in options.engines if name in MODES):
        asked = {**request, "engine": engine}
        held = report["engines"].setdefault(engine, {"rounds": []})
        try:
            held["predicted"] = ask("suite.rank_prediction", asked, {}, 300.0)
        except (QuestionError, TimeoutError) as error:
            say(f"{engine} is not predicted: {one_line(str(error))}")
    for turn in range(options.rounds):
        for engine in options.engines:
            held = report["engines"].setdefault(engine, {"rounds": []})
            try:
                held["rounds"].append(_answers({**request, "engine": engine}))
            except (QuestionError, TimeoutError) as error:
                held["error"] = one_line(str(error))
                say(f"{engine}: {held['error']}")
                continue
            say(f"round {turn + 1}, {engine}: {_milliseconds(held):.0f} ms")
            path = write(report, table(report))
    report["agree"] = _agree(report)
    return report, write(report, table(report)) or path


def _answers(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of all ranks, which run at the same time."""
    ranks = request["ranks"]
    environment = {"OMP_NUM_THREADS": str(request["threads"]), "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        asked = [{**request, "folder": folder, "rank": rank} for rank in range(ranks)]
        # a launcher tells its processes so, and DeepSpeed reads it
        told = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}

        def answered(one: dict[str, Any]) -> Any:
            own = {"RANK": str(one["rank"]), "LOCAL_RANK": str(one["rank"])}
            return ask("suite.rank_engines", one, {**environment, **told, **own}, 300.0)

        return list(pool.map(answered, asked))


def _milliseconds(held: dict[str, Any]) -> float:
    """The median step of all rounds; rank 0's, since ranks wait for one another."""
    return 1e3 * statistics.median(s for answers in held["rounds"] for s in answers[0]["seconds"])


def _peak(held: dict[str, Any]) -> float:
    """The most that a rank needs, in MiB; the least of the rounds, which others disturb least."""
    return min(max(one["peak_bytes"] for one in answers) for answers in held["rounds"]) / MIB


def _runtime(held: dict[str, Any]) -> float:
    """What the engine's modules hold before the model is there, in MiB; the median of the ranks."""
    answers = [one for answers in held["rounds"] for one in answers]
    return statistics.median(one["runtime_bytes"] for one in answers) / MIB


def _predicted(held: dict[str, Any]) -> tuple[str, str]:
    """The predicted memory in MiB, and how far it is from the measured one."""
    if "predicted" not in held:
        return "", ""
    found = held["predicted"]["bytes"] / MIB
    return f"{found:.0f}", f"{found / _peak(held) - 1:+.1%}"


def _losses(held: dict[str, Any]) -> list[float]:
    return held["rounds"][0][0]["losses"]


def _apart(held: dict[str, Any], base: dict[str, Any]) -> float:
    """The largest relative distance of a step's loss from the base's."""
    pairs = zip(_losses(held), _losses(base), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def _agree(report: dict[str, Any]) -> bool:
    held = list(report["engines"].values())
    if any("error" in one for one in held):
        return False
    return all(_apart(one, held[0]) < LEVEL for one in held)


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows: list[list[str]] = []
    found = {n: held for n, held in report["engines"].items() if held["rounds"]}
    base = next(iter(found.values()), None)
    for name, held in report["engines"].items():
        if not held["rounds"] or base is None:
            rows.append([name, held.get("error", "")])
            continue
        carried = statistics.median(answers[0]["carried_bytes"] for answers in held["rounds"])
        rows.append([
            name, f"{_milliseconds(held):.0f}", f"{_milliseconds(held) / _milliseconds(base):.2f}",
            f"{_peak(held):.0f}", *_predicted(held), f"{_runtime(held):.0f}",
            f"{carried / MIB:.0f}", f"{_apart(held, base):.1e}",
        ])  # fmt: skip
    head = [
        "engine", "step, ms", "of the first", "memory of a rank, MiB", "predicted", "by",
        "runtime, MiB", "sent by all, MiB",
    ]  # fmt: skip
    lines = [
        *heading(report), "",
        f"{MODELS[report['model']][0]} {report['size']}, {report['rows']} samples of "
        f"{report['length']} tokens on each "
        "of the ranks; no dropout, AdamW, fp32.", "",
        *(f"- {name}: {ENGINES[name]}" for name in report["engines"]), "",
        *markdown([*head, "loss apart"], rows), "",
        *(["DeepSpeed is not installed here, and left out."] if report.get("left_out") else []),
        "memory: the highest resident set of steady steps less that after steps of a narrow "
        "model of as many layers; runtime: what those steps have left of modules and of compiling.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
