"""Runs both engines on one job, each in a process of its own, and makes a table of the results."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from onward.recipes.loop import EngineResult, Job, TrainingError, eval_results, train
from onward.recipes.own_program import own_command
from onward.recipes.run_folder import OF_TORCH, RESULTS, publish_json, write_json
from onward.recipes.score_numbers import score_number
from onward.recipes.tasks import Baseline

# Onward first, so that a failing capture shows before time is spent on the other engine.
ENGINE_ORDER = ("onward", "torch")
JOB_OPTION = "--engine_job="


class EngineFailed(Exception):
    """Raised if the process of an engine ended with exit status `status`; it has printed the
    reason."""

    def __init__(self, engine: str, status: int) -> None:
        super().__init__(f"engine {engine} ended with status {status}")
        self.engine = engine
        self.status = status


def run_engine(job_folder: Path, engine: str, folder: Path) -> EngineResult:
    """Trains with `engine` in a new process, which writes into `folder`."""
    command = own_command("finetune", f"{JOB_OPTION}{job_folder}", engine, str(folder))
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise EngineFailed(engine, status)
    result = json.loads(_result_file(job_folder, engine).read_text(encoding="utf-8"))
    return EngineResult(**{**result, "step_losses": tuple(result["step_losses"])})


def run_job(job_folder: Path, engine: str, folder: Path) -> None:
    """Runs an engine's job in the process that `run_engine` started."""
    job = Job.load(job_folder)
    result = train(job, engine, folder, save_model=engine == "onward")
    publish_json(folder, RESULTS, eval_results(job, result))
    write_json(_result_file(job_folder, engine), asdict(result))


def _result_file(job_folder: Path, engine: str) -> Path:
    return job_folder / f"result-{engine}.json"


def run_both(job: Job, job_folder: Path, folder: Path) -> dict[str, EngineResult]:
    """Runs both engines: Onward writes into `folder`, where its model is saved, torch into
    `folder/torch`. Raises TrainingError if their start weights differ."""
    job.save(job_folder)
    (folder / OF_TORCH).mkdir(exist_ok=True)  # with files of others, which stay
    folders = {"onward": folder, "torch": folder / OF_TORCH}
    results = {name: run_engine(job_folder, name, folders[name]) for name in ENGINE_ORDER}
    if len({result.start_weights_sha256 for result in results.values()}) != 1:
        raise TrainingError("the engines had different start weights, in --compare; fix: report it")
    return results


@dataclass(frozen=True)
class TableRow:
    """One line of the table: `value` of a result, formatted by `form`; no line where it is None.

    ratio: label of Onward's value as a share of the reference's: "as fast" or "the memory"; "": no
    share is shown.
    """

    title: str
    value: Callable[[EngineResult], float | None]
    form: str
    ratio: str = ""


ROWS = (
    TableRow("total time, s", lambda r: r.total_s, ".1f", "as fast"),
    TableRow("training time, s", lambda r: r.train_s, ".1f", "as fast"),
    TableRow("tokens/s after the first step", lambda r: r.tokens_per_second, ".0f", "as fast"),
    TableRow("first step, s", lambda r: r.first_step_s, ".2f", "as fast"),
    TableRow("peak memory, MiB", lambda r: r.peak_rss_mib, ".0f", "the memory"),
    TableRow(
        "  above the imports, MiB", lambda r: r.peak_rss_mib - r.base_rss_mib, ".0f", "the memory"
    ),
    TableRow("peak memory of the GPU, MiB", lambda r: r.peak_device_mib, ".0f", "the memory"),
    TableRow("final train loss (last 10 updates)", lambda r: r.train_loss, ".4f"),
    TableRow("eval loss", lambda r: r.eval_loss, ".4f"),
)


def largest_difference(ours: EngineResult, reference: EngineResult) -> tuple[float, int]:
    """The largest difference |a - b| / |b| between the losses of updates, and the number (from 1)
    of that update. Beside a loss of 0 any other is a difference of 1."""
    differences = [
        abs(a - b) / (abs(b) or abs(a) or 1.0)
        for a, b in zip(ours.step_losses, reference.step_losses, strict=True)
    ]
    largest = max(differences)
    return largest, differences.index(largest) + 1


def comparison(ours: EngineResult, reference: EngineResult) -> dict[str, object]:
    """The content of compare.json."""
    difference, step = largest_difference(ours, reference)
    return {
        "engines": [asdict(ours), asdict(reference)],
        "max_relative_loss_difference": difference,
        "max_relative_loss_difference_step": step,
    }


def table(ours: EngineResult, reference: EngineResult, baseline: Baseline) -> str:
    """The table of both engines; for time and memory, also Onward as a share of the reference."""
    lines = [f"{'':<36}{ours.engine:>12}{reference.engine:>12}"]
    for row in ROWS:
        a, b = row.value(ours), row.value(reference)
        if a is None or b is None:
            continue
        line = f"{row.title:<36}{a:>12{row.form}}{b:>12{row.form}}"
        if row.ratio and a > 0 and b > 0:
            share = b / a if row.title.endswith(", s") else a / b
            line += f"   {share:.2f}x {row.ratio}"
        lines.append(line)
    for name, value in ours.scores.items():
        told = [f"{score_number(v):>12}" for v in (value, reference.scores[name])]
        lines.append(f"{name.replace('_', ' '):<36}{''.join(told)}")
    value = f"{score_number(baseline.value):>12}"
    lines.append(f"{f'{baseline.metric}, {baseline.of}':<36}{value}{value}")
    difference, step = largest_difference(ours, reference)
    lines.append(f"{'largest relative loss difference':<36}{difference:>12.1e}   at update {step}")
    return "\n".join([*lines, "", in_words(ours, reference)])


def in_words(ours: EngineResult, reference: EngineResult) -> str:
    """One sentence about time and memory."""
    total = reference.total_s / ours.total_s
    later = ours.tokens_per_second / reference.tokens_per_second
    share = ours.peak_memory_mib / reference.peak_memory_mib
    return (
        f"Onward is {_times(total)} in total, {_times(later)} after the first step, with "
        f"{abs(1 - share):.0%} {'less' if share <= 1 else 'more'} memory than eager PyTorch."
    )


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x as fast" if ratio >= 1 else f"{1 / ratio:.1f}x slower"
