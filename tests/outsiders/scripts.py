"""Runs the example scripts of transformers, from a checkout that a tester has, beside themselves
with the import of Trainer changed.

Each trains a tiny model of ours, without dropout, on the sources of the standard library; compared
is what is logged after each step, and how long the first step and all of them took.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import assets

from onward.environment import environment

HERE = Path(__file__).resolve().parent
NEAR = 2e-7  # of a loss, relative, for each update before it: each rounds once
STEPS = 60
OURS = "onward.integrations.transformers"
IMPORT = re.compile(r"from transformers import (\([^)]*\)|[^\n(]*)")
TRAINERS = ("Seq2SeqTrainer", "Trainer")


@dataclass(frozen=True)
class Script:
    """path: below the folder of examples. model, task: of `assets`. more: its own arguments."""

    path: str
    model: str
    task: str
    more: tuple[str, ...] = field(default=())


SCRIPTS = {
    s.path.rpartition("/")[2].removesuffix(".py"): s
    for s in (
        Script("language-modeling/run_clm.py", "gpt2", "text", ("--block_size", "32")),
        Script("language-modeling/run_mlm.py", "bert", "text", ("--max_seq_length", "32")),
        Script("text-classification/run_glue.py", "bert", "classes", ("--max_seq_length", "48")),
        Script("token-classification/run_ner.py", "bert", "tags"),
        Script(
            "question-answering/run_qa.py", "bert", "answers",
            ("--max_seq_length", "48", "--doc_stride", "8"),
        ),
        Script(
            "summarization/run_summarization.py", "t5", "summaries",
            ("--max_source_length", "32", "--max_target_length", "32"),
        ),
        Script(
            "translation/run_translation.py", "t5", "pairs",
            ("--source_lang", "en", "--target_lang", "ro", "--max_source_length", "32",
             "--max_target_length", "32"),
        ),
    )
}  # fmt: skip


@dataclass
class Ran:
    """log: a dict a line. steps: seconds since the beginning, after each. failed: why."""

    log: list[dict[str, Any]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    failed: str = ""


def changed(source: str) -> str:
    """A script's text in which Trainer comes from Onward; the same text where it has none."""

    def take(found: re.Match[str]) -> str:
        names = [n.strip() for n in found[1].strip("()").split(",") if n.strip()]
        taken = [n for n in names if n in TRAINERS]
        if not taken:
            return found[0]
        rest = ", ".join(n for n in names if n not in taken)
        kept = f"from transformers import ({rest})\n" if rest else ""
        return f"{kept}from {OURS} import {', '.join(taken)}"

    return IMPORT.sub(take, source)


def folder_of(path: Path) -> Path:
    """The folder that holds the scripts. Raises ValueError."""
    for folder in (path / "examples" / "pytorch", path / "pytorch", path):
        if (folder / "language-modeling").is_dir():
            return folder
    raise ValueError(
        f"{path} has no language-modeling/run_clm.py; fix: --scripts a checkout of transformers, "
        "or its folder examples/pytorch"
    )


def run(script: Script, folder: Path, side: str, work: Path, more: Iterable[str] = ()) -> Ran:
    """The script on one side, in a process of its own, which finds what one before has kept."""
    own = work / f"{side}-{Path(script.path).stem}"
    for left in (own, work / f"{own.name}-out"):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(folder / Path(script.path).parent, own)
    if side == "drop-in":
        for file in own.glob("*.py"):
            file.write_text(changed(file.read_text()))
    result = work / f"{own.name}.json"
    checked = []
    if script.task == "classes":  # that script asks for both
        checked = ["--validation_file", assets.data(script.task, work)]
    command = [
        sys.executable, str(HERE / "launch.py"), str(result), side,
        str(own / Path(script.path).name), "--model_name_or_path",
        assets.saved(script.model, work), "--train_file", assets.data(script.task, work),
        *checked,
        "--do_train", "--output_dir", str(work / f"{own.name}-out"), "--max_steps", str(STEPS),
        "--logging_steps", "1", "--per_device_train_batch_size", "4", "--save_strategy", "no",
        "--report_to", "none", "--disable_tqdm", "True", "--use_cpu", "True", "--seed", "3",
        "--dataloader_pin_memory", "False", "--learning_rate", "1e-3", "--log_level", "error",
        *script.more, *more,
    ]  # fmt: skip
    environment = {
        **os.environ, "ONWARD_CACHE": str(_cache(work)), "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "datasets"),
        "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
        ),
    }  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=work)
    if done.returncode or not result.exists():
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["nothing said"]
        return Ran(failed=last[0][:300])
    return Ran(**json.loads(result.read_text()))


def _cache(work: Path) -> Path:
    """A cache that holds what is measured of the machine, and at first no graph."""
    mine = work / "cache"
    if not mine.exists():
        mine.mkdir()
        measured = environment().cache / "products"
        if measured.is_dir():
            shutil.copytree(measured, mine / measured.name)
    return mine


def difference(stock: Ran, ours: Ran, near: float = NEAR) -> str:
    """Where the logs are not the same; nothing where they are."""
    if ours.failed:
        return f"fails: {ours.failed}"
    if len(stock.log) != len(ours.log):
        return f"{len(ours.log)} lines of log, stock has {len(stock.log)}"
    for one, two in zip(stock.log, ours.log, strict=True):
        for name in ("loss", "eval_loss"):
            if name in one:
                want, have = float(one[name]), float(two.get(name, float("nan")))
                if not abs(have - want) <= near * max(2, one["step"]) * abs(want):
                    return f"step {one['step']}: {name} {have!r}, stock {want!r}"
    return ""


def row(name: str, *runs: Ran) -> str:
    """A line of the table of first steps: script, then first step and all steps of each run, in
    seconds."""
    times = [f"{s.steps[0]:.2f} | {s.steps[-1]:.2f}" for s in runs]
    return f"| {name} | {' | '.join(times)} |"


HEAD_AGAIN = (
    "| script | first step, stock | {n} steps, stock | first step, Onward | {n} steps, Onward "
    "| first step, second run | {n} steps, second run |\n|---|---|---|---|---|---|---|"
)
HEAD = (
    "| script | first step, stock | {n} steps, stock | first step, Onward | {n} steps, Onward |\n"
    "|---|---|---|---|---|"
)
