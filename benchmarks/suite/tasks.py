"""The tasks of `onward finetune`, trained by both engines in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.recipes.tasks import Baseline
from suite.progress import Clock, say
from suite.report import Writer, heading, markdown, started

# few tokens and a higher rate: hidden tokens are learnt late
TOKENS = (
    "--vocab_size", "500", "--block_size", "64", "--learning_rate", "3e-3",
    "--per_device_train_batch_size", "16",
)  # fmt: skip
# The updates of each task, and what else its command line has.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "causal-lm": (150, ()),
    "masked-lm": (400, TOKENS),
    "text-classification": (150, ("--max_seq_length", "96")),
    "token-classification": (150, ()),
    "question-answering": (200, ("--max_seq_length", "256")),
    "multiple-choice": (200, ("--max_seq_length", "96")),
    "seq2seq-lm": (200, ("--max_seq_length", "128", "--vocab_size", "1000")),
    "text-retrieval": (100, ("--max_seq_length", "96", "--vocab_size", "1000")),
    "image-classification": (150, ("--per_device_train_batch_size", "16")),
    "automatic-speech-recognition": (200, ("--per_device_train_batch_size", "16")),
}
SHARED = (
    "--dropout",
    "0",
    "--compare",
    "--max_eval_samples",
    "400",
    "--lr_scheduler_type",
    "linear",
)
WARMUP = ("--warmup_ratio", "0.1")
# The first updates, and the relative difference of their losses. Later ones tell nothing: eager
# PyTorch departs as far from itself where its start weights change by 1e-7 (docs/log.md).
FIRST, FARTHEST = 20, 1e-5


def run(
    names: Sequence[str], clock: Clock, write: Writer, quick: bool
) -> tuple[dict[str, Any], Path]:
    """Trains each task; writes after each one."""
    report = started("Tasks of onward finetune, on the sources of Python's library")
    report["tasks"] = {}
    path = write(report, table(report))
    for name in names:
        if clock.over():
            say(f"{name}: left out, no time is left")
            continue
        say(f"{name} ...")
        report["tasks"][name] = _trained(name, quick)
        path = write(report, table(report))
    return report, path


def _trained(name: str, quick: bool) -> dict[str, Any]:
    steps, more = CASES[name]
    with tempfile.TemporaryDirectory(prefix="onward-tasks-") as folder:
        out = Path(folder) / "out"
        words = ["--task", name, "--max_steps", str(3 if quick else steps), *SHARED, *WARMUP, *more]
        if quick:
            words += ["--corpus_bytes", "1500000"]
            words += [] if name == "image-classification" else ["--vocab_size", "400"]
            words[words.index("--max_eval_samples") + 1] = "9"
        command = [sys.executable, "-m", "onward", "finetune", *words, "--output_dir", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        compared = json.loads((out / "compare.json").read_text(encoding="utf-8"))
        record = json.loads((out / "run_config.json").read_text(encoding="utf-8"))
    return {
        "command": f"onward finetune {' '.join(words)}",
        "baseline": record["baseline"],
        "parameters": record["parameters"],
        "engines": compared["engines"],
        "max_relative_loss_difference": compared["max_relative_loss_difference"],
    }


def is_good(report: Mapping[str, Any]) -> bool:
    """Whether every task beats no model, with the losses of eager PyTorch."""
    return all(map(_is_good, report["tasks"].values()))


def _is_good(found: Mapping[str, Any]) -> bool:
    baseline, ours = found["baseline"], found["engines"][0]
    score = ours["scores"][baseline["metric"]]
    return Baseline(**baseline).is_beaten(score) and _apart(found) <= FARTHEST


def _apart(found: Mapping[str, Any]) -> float:
    """The largest relative difference of losses in the first updates."""
    ours, eager = (each["step_losses"][:FIRST] for each in found["engines"])
    return max(abs(a - b) / abs(b) for a, b in zip(ours, eager, strict=True))


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    head = [
        "task", "score", "no model", "Onward", "eager", "s", "eager, s", "as fast", "MiB",
        "eager, MiB", f"apart, {FIRST} updates", "all updates",
    ]  # fmt: skip
    rows = []
    for name, found in report["tasks"].items():
        ours, eager = found["engines"]
        metric = found["baseline"]["metric"]
        memory = [each["peak_rss_mib"] - each["base_rss_mib"] for each in (ours, eager)]
        rows.append(
            [
                name, metric, f"{found['baseline']['value']:.4g}",
                *(f"{each['scores'][metric]:.4g}" for each in (ours, eager)),
                *(f"{each['train_s']:.1f}" for each in (ours, eager)),
                f"{eager['train_s'] / ours['train_s']:.2f}x",
                *(f"{each:.0f}" for each in memory),
                f"{_apart(found):.1e}", f"{found['max_relative_loss_difference']:.1e}",
            ]
        )  # fmt: skip
    notes = [
        "", "Seconds of all updates, the first one and its compilation too. MiB: peak above the",
        "imports. Apart: the largest relative difference of two losses of one update, in the",
        f"first {FIRST} and in all: rounding grows, within eager PyTorch as well.", "",
        *(f"    {found['command']}" for found in report["tasks"].values()), "",
    ]  # fmt: skip
    return "\n".join([*heading(report), "", *markdown(head, rows, 2), *notes])
