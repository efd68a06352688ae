"""The output folder of a run, from the first line of its metrics to the model.

runs/wiki/
    run_config.json      what the run is, written first; by it the same command is known again
    metrics.jsonl        grows while the run trains
    tensorboard/, reports.json  with --report_to: TensorBoard's files; the run's names elsewhere
    checkpoint-500/      see `onward.checkpoint`
    config.json, model.safetensors, model.onnx, tokenizer.json, ...   after the last update
    generated_predictions.jsonl   with --predict_with_generate
    document/            of text-retrieval with two encoders: the document's, in the same form
    step.json, samples.json, verify.json, trace.json, report.html, README.md
                         see `onward.recipes.report`
    eval_results.json    last of all (compare.json in a comparison): nothing is left to do
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from onward.checkpoint import (
    StagedFiles,
    checkpoints,
    damaged,
    is_checkpoint,
    remove,
    remove_unpublished,
    settle,
)
from onward.recipes.options import RECORD, FinetuneConfig, InputError, check_unused, is_run
from onward.recipes.report.written_files import MARKED, SAMPLES, STEP, TRACE, VERIFIED, is_ours
from onward.recipes.task_switches import SWITCH_TASKS
from onward.recipes.tower_settings import (
    DOCUMENT,
    DOCUMENTS,
    HEAD_FILE,
    INDEX,
    MODULES_FILE,
    POOLING_FILE,
)
from onward.recipes.trainer_switches import shares_of
from onward.reporting.reporter import EVENTS, KEPT

METRICS = "metrics.jsonl"
_LARGEST = 16 << 20  # bytes of run_config.json
RESULTS = "eval_results.json"
PREDICTIONS = "generated_predictions.jsonl"
COMPARISON = "compare.json"
OF_TORCH = "torch"  # the folder of the other engine in a comparison

# What a run writes beside these and its checkpoints, as patterns.
_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "model.onnx",
    "model.onnx.data",
    "crossing.onnx",
    PREDICTIONS,
    HEAD_FILE,
    MODULES_FILE,
    INDEX,
    DOCUMENTS,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)
# Options that may differ when a run is resumed: they change neither its numbers nor what it writes
# at the end. Texts and tokens are compared by content, epochs by the updates that they make.
FREE_OPTIONS = frozenset(
    {
        "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "dry_run", "save_strategy",
        "save_steps", "save_total_limit", "memory_budget", "allow_pickle", "train_file",
        "validation_file", "num_train_epochs", "report_to", "run_name", "logging_dir", "zero",
        "pipeline_schedule", "pipeline_microbatches", "sequence_parallel",
        "context_parallel_method", "offload_optimizer", "offload_dir", "gradient_checkpointing",
        "eval_strategy", "eval_steps", "dataloader_num_workers", "use_cpu",
        "ignore_mismatched_sizes",
    }
)  # fmt: skip
# Options that may differ as long as an update has the same number of samples.
_SHARING = ("per_device_train_batch_size", "gradient_accumulation_steps", "mesh")
_CONTENTS = (
    ("blocks_sha256", "another tokenizer in --model_name_or_path or --tokenizer_name"),
    ("model_config_sha256", "another config.json in --model_name_or_path"),
)


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON (a NaN raises), indented, ending in a line feed."""
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def publish_json(folder: Path, name: str, value: Any) -> None:
    """Writes JSON as `write_json` does; the file appears whole or not at all."""
    with StagedFiles(folder) as staged:
        write_json(staged.path / name, value)
        staged.publish()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What makes two runs different ones, by the content of their `run_config.json`, in words."""
    defaults = asdict(FinetuneConfig())
    there, here = {**defaults, **before["options"]}, {**defaults, **now["options"]}
    rows, own = _rows(there), _rows(here)
    # the masks of eager PyTorch follow micro-batches
    shares = here["engine"] == "onward" and rows is not None and own is not None
    free = FREE_OPTIONS | {*(_SHARING if shares else ())}
    if here["load_best_model_at_end"] or here["early_stopping_patience"]:
        free -= {"eval_strategy", "eval_steps"}  # which decide about the weights then
    found: list[str] = []
    for name, value in here.items():
        old = there.get(name)
        tasks = SWITCH_TASKS.get(name)
        # an option that the task does not have is at its version's default
        counts = name not in free and (tasks is None or here["task"] in tasks)
        if counts and old != value:
            switch = {"max_steps": "--max_steps or --num_train_epochs"}.get(name, f"--{name}")
            found.append(f"{switch} {_shown(old)} there, {_shown(value)} here")
    if shares and rows != own:
        words = " and ".join(f"--{name}" for name in _SHARING if there[name] != here[name])
        found.append(f"{words} make {rows} sequences an update there, {own} here")
    if before["options"].get("corpus_bytes") == now["options"].get("corpus_bytes"):
        for number, name in enumerate(("train_file", "validation_file")):
            texts = [[t["sha256"] for t in each["texts"][number:][:1]] for each in (before, now)]
            if texts[0] != texts[1]:
                found.append(f"another text in --{name}")
    # what follows from the options above, or else from what a folder holds
    for name, words in _CONTENTS:
        if before[name] != now[name] and not found:
            found.append(words)
    return found


def _rows(options: Mapping[str, Any]) -> int | None:
    """The sequences of an update; None where the options are none that a run has."""
    size, times, mesh = (options[name] for name in _SHARING)
    if type(size) is not int or type(times) is not int or not isinstance(mesh, str | None):
        return None
    try:
        return size * times * shares_of(mesh)
    except InputError:
        return None


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def check_same_run(before: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Raises InputError, which names the switches that differ, where `before` is another run's
    `run_config.json`."""
    found = differences(before, now)
    if found:
        raise InputError(
            f"{str(where)!r} is of another run ({'; '.join(found)})",
            "in --output_dir",
            "give the same switches to go on, name another folder, or start afresh with "
            "--overwrite_output_dir",
        )


def read_record(folder: Path) -> dict[str, Any]:
    """Reads a run's `run_config.json`. Raises InputError where it is damaged."""
    path = folder / RECORD
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
            raise ValueError(f"it is no regular file of at most {_LARGEST >> 20} MiB")
        record = json.loads(path.read_bytes())
        differences(record, record)  # reads all that it needs
    except Exception as error:  # any, since a value of any type may stand anywhere
        raise InputError(
            f"{str(path)!r} cannot be read ({error!r})",
            "in --output_dir",
            "name another folder, or start afresh with --overwrite_output_dir",
        ) from error
    return record


def options_of(record: Mapping[str, Any]) -> FinetuneConfig:
    """The options in a run's `run_config.json`, as far as this version has them."""
    known = {field.name for field in fields(FinetuneConfig)}
    return FinetuneConfig(**{n: v for n, v in record["options"].items() if n in known})


class RunFolder:
    """The output folder of one run, held by this process alone.

    `with RunFolder(path) as folder:` makes the folder; `begin` then finds out whether it is this
    run's. After an error the folder stays if a model or a checkpoint is in it; else what the run
    has written is removed, with the folder and any parents that were made for it.

    kept: the folder, where it stayed after an error of a run that had begun in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.kept: Path | None = None
        self._made: list[Path] = []
        self._begun = False
        self._lock: int | None = None

    def __enter__(self) -> RunFolder:
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None and self.is_kept:
            self.kept = self.path if self._begun else None
        elif kind is not None:
            if self._begun:
                self._clear()
                (self.path / RECORD).unlink(missing_ok=True)
            for path in self._made:
                try:
                    path.rmdir()
                except OSError:
                    break
        if self._lock is not None:
            os.close(self._lock)

    def begin(self, record: Mapping[str, Any], overwrite: bool) -> None:
        """Takes the folder for the run that `record`, its `run_config.json`, describes. Raises
        InputError where it holds another run or other files.

        overwrite: removes first what a run has written there; other files stay.
        """
        if is_run(self.path):
            if not overwrite:
                check_same_run(read_record(self.path), record, self.path)
        else:
            check_unused(self.path)
        self._begun = True
        remove_unpublished(self.path)
        settle(self.path)
        if overwrite:
            self._clear()
        elif not (self.is_complete or self._has_checkpoints):
            self._clear(reports=False)  # services go on with the run that they have
        if overwrite or not is_run(self.path):
            publish_json(self.path, RECORD, record)

    @property
    def is_complete(self) -> bool:
        """Whether the run in the folder has nothing left to do."""
        options = read_record(self.path)["options"] if is_run(self.path) else {}
        return (self.path / (COMPARISON if options.get("compare") else RESULTS)).is_file()

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint, by its manifest; None where there is none."""
        found = checkpoints(self.path)
        return found[0].path if found else None

    @property
    def _has_checkpoints(self) -> bool:
        """Whether there is a checkpoint, be it damaged."""
        return bool(checkpoints(self.path) or damaged(self.path))

    @property
    def is_kept(self) -> bool:
        """Whether there is a checkpoint or a model in the folder."""
        return self._has_checkpoints or any(self.path.glob("*.safetensors"))

    @property
    def _has_compared(self) -> bool:
        """Whether the run in the folder compares engines, so that it has a folder for the other."""
        if (self.path / COMPARISON).is_file():
            return True
        try:
            return bool(read_record(self.path)["options"].get("compare"))
        except InputError:  # nothing tells, and what stays there is written over
            return False

    def _clear(self, reports: bool = True) -> None:
        """Removes what a run has written but its record, first what says that it is complete.
        reports: also what it has written of reports to services."""
        # others' folders may have the names that theirs have
        has_towers = (self.path / HEAD_FILE).is_file()
        has_compared = self._has_compared
        for name in (COMPARISON, RESULTS):
            (self.path / name).unlink(missing_ok=True)
        for path in self.path.glob("checkpoint-*"):
            if is_checkpoint(path):
                remove(path)
        of_reports = (KEPT, f"{EVENTS}/events.out.tfevents.*") if reports else ()
        for name in MARKED:
            if is_ours(self.path / name):
                (self.path / name).unlink()
        for pattern in (METRICS, STEP, SAMPLES, VERIFIED, TRACE, *_MODEL_FILES, *of_reports):
            for path in self.path.glob(pattern):
                path.unlink()
        folders = [EVENTS] if reports else []
        if has_compared and (self.path / OF_TORCH).is_dir():
            remove_unpublished(self.path / OF_TORCH)
            for name in (METRICS, RESULTS, PREDICTIONS):
                (self.path / OF_TORCH / name).unlink(missing_ok=True)
            folders.append(OF_TORCH)
        if has_towers:
            for pattern in (POOLING_FILE, *_MODEL_FILES):
                for place in (self.path, self.path / DOCUMENT):
                    for path in place.glob(pattern):
                        path.unlink()
            folders += [f"{DOCUMENT}/1_Pooling", "1_Pooling", DOCUMENT]
        for name in folders:
            with contextlib.suppress(OSError):  # not there, or with files of others
                (self.path / name).rmdir()


def _locked(folder: Path) -> int | None:
    """A handle that locks the folder until it is closed, or its process ends in any way; None where
    the system has no such locks. Raises InputError where another process holds it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except BlockingIOError:
        os.close(handle)
        raise InputError(
            f"another process trains in {str(folder)!r}",
            "in --output_dir",
            "wait for it, or name another folder",
        ) from None
    except OSError:  # some network file systems
        os.close(handle)
        return None


def cut_metrics(source: Path, target: Path, step: int) -> None:
    """Makes `target` the lines of `source` up to update number `step`, which come before the first
    line that is later, or that a kill has cut. The two may be one file, which may be missing."""
    kept = bytearray()
    with contextlib.suppress(FileNotFoundError):
        for line in source.read_bytes().splitlines(keepends=True):
            try:
                is_kept = line.endswith(b"\n") and json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                is_kept = False
            if not is_kept:
                break
            kept += line
    with StagedFiles(target.parent) as staged:
        (staged.path / target.name).write_bytes(kept)
        staged.publish()


__all__ = [
    "RunFolder",
    "check_same_run",
    "cut_metrics",
    "differences",
    "options_of",
    "publish_json",
    "read_record",
    "write_json",
]
