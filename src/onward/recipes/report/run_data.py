"""Reads a run's folder for its report; no torch is needed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.recipes.options import RECORD, InputError
from onward.recipes.report.written_files import SAMPLES, STEP, VERIFIED
from onward.recipes.score_numbers import perplexity

METRICS, RESULTS, COMPARISON, OF_TORCH = (
    "metrics.jsonl",
    "eval_results.json",
    "compare.json",
    "torch",
)
_LARGEST = 256 << 20  # bytes of a file that is read


@dataclass(frozen=True)
class RunData:
    """What a run's folder holds.

    record: `run_config.json`. lines: those of `metrics.jsonl` with a training loss, by engine;
    evaluations: those with an evaluation loss. results: by engine; empty while the run is not
    complete. step, verified: None where there is none. notes: what is missing or damaged.
    """

    path: Path
    record: Mapping[str, Any]
    lines: Mapping[str, list[dict[str, float]]]
    evaluations: Mapping[str, list[dict[str, float]]]
    results: Mapping[str, Mapping[str, Any]]
    step: Mapping[str, Any] | None
    samples: tuple[Mapping[str, str], ...]
    verified: Mapping[str, Any] | None
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def options(self) -> Mapping[str, Any]:
        return self.record["options"]

    @property
    def is_complete(self) -> bool:
        """Whether the run has nothing left to do."""
        return len(self.results) == (2 if self.options.get("compare") else 1)


def read_run(path: Path) -> RunData:
    """Reads the folder of a run that is complete, running or stopped. Raises InputError where it is
    the folder of no run."""
    notes: list[str] = []
    if not (path / RECORD).is_file():
        raise InputError(
            f"{str(path)!r} is no folder of a run (it has no {RECORD})",
            "as RUN",
            "name an --output_dir of onward finetune",
        )
    record = _json(path / RECORD, notes)
    if not isinstance(record, dict) or not isinstance(record.get("options"), dict):
        raise InputError(f"{str(path / RECORD)!r} cannot be read", "as RUN", "name another run")
    lines: dict[str, list[dict[str, float]]] = {}
    evaluations: dict[str, list[dict[str, float]]] = {}
    compare = bool(record["options"].get("compare"))
    for file in (path / METRICS, *([path / OF_TORCH / METRICS] if compare else [])):
        _read_metrics(file, file.relative_to(path), lines, evaluations, notes)
    step = _json(path / STEP, notes)
    verified = _json(path / VERIFIED, notes)
    samples = _json(path / SAMPLES, notes)
    return RunData(
        path.absolute(),
        record,
        lines,
        evaluations,
        _results(path, compare, notes),
        step if isinstance(step, dict) else None,
        tuple(s for s in samples if isinstance(s, dict)) if isinstance(samples, list) else (),
        verified if isinstance(verified, dict) else None,
        tuple(notes),
    )


def _json(path: Path, notes: list[str]) -> Any:
    """The content of a file; None where it is missing, or damaged, which is noted."""
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > _LARGEST:
            raise ValueError("too large")
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        notes.append(f"{path.name} is damaged, and left out")
        return None


def _read_metrics(
    file: Path,
    name: Path,
    lines: dict[str, list[dict[str, float]]],
    evaluations: dict[str, list[dict[str, float]]],
    notes: list[str],
) -> None:
    try:
        raw = file.read_bytes().splitlines() if file.is_file() else []
    except OSError:
        raw = []
    bad: list[int] = []
    for number, text in enumerate(raw, 1):
        try:
            line = json.loads(text)
            engine = str(line.pop("engine"))
            values = {key: float(v) for key, v in line.items() if v is not None}
            is_evaluation = "eval_loss" in values
            needed = ("step", "eval_loss" if is_evaluation else "loss")
            if not all(math.isfinite(values[key]) for key in needed):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            bad.append(number)
            continue
        (evaluations if is_evaluation else lines).setdefault(engine, []).append(values)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        notes.append(f"{name.as_posix()}: line {bad[0]}{more} damaged, and left out")
    if not raw:
        notes.append(f"{name.as_posix()} has no lines yet")


SCORES = (  # of all tasks
    "perplexity", "accuracy", "f1_macro", "exact_match", "precision", "recall", "f1", "mse",
    "pearson", "pretraining_loss", "next_sentence_accuracy", "recall_at_1", "recall_at_10", "auc",
    "rouge1", "rouge2", "rougeL", "bleu", "wer", "cer", "HasAns_exact", "HasAns_f1", "NoAns_exact",
    "NoAns_f1",
)  # fmt: skip


def _results(path: Path, compare: bool, notes: list[str]) -> dict[str, Mapping[str, Any]]:
    found = _json(path / (COMPARISON if compare else RESULTS), notes)
    if not isinstance(found, dict):
        return {}
    try:
        listed = [dict(one) for one in found["engines"]] if compare else [found]
        return {str(one["engine"]): _complete(one) for one in listed}
    except (KeyError, TypeError, ValueError, OverflowError):
        notes.append("the results are damaged, and left out")
        return {}


def _complete(one: dict[str, Any]) -> dict[str, Any]:
    """Results with one set of names, whichever file they come from."""
    losses, scores = one.get("step_losses"), one.get("scores", one)
    if not any(name in scores for name in SCORES):  # an older run, of a language model
        scores = {"perplexity": perplexity(float(one["eval_loss"]))}
    last = [float(x) for x in losses[-10:]] if losses else []
    train_s = float(one["train_s"] if "train_s" in one else one["train_runtime"])
    eval_s = float(one["eval_s"] if "eval_s" in one else one["eval_runtime"])
    return {
        "total_s": train_s + eval_s,
        "train_s": train_s,
        "first_step_s": float(one["first_step_s"]),
        "tokens_per_second": float(one["tokens_per_second"]),
        "peak_memory_mib": float(one.get("peak_device_mib") or one["peak_rss_mib"]),
        "train_loss": sum(last) / len(last) if last else float(one["train_loss"]),
        "eval_loss": float(one["eval_loss"]),
        **{name: float(scores[name]) for name in SCORES if name in scores},
    }
