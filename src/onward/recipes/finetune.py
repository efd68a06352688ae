"""`onward finetune`: from options to a described run, and the run itself."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onward
from onward.checkpoint import StagedFiles
from onward.errors import OnwardError
from onward.recipes.describe import Run, describe
from onward.recipes.devices import device_line, take_device, training_device
from onward.recipes.options import FinetuneConfig
from onward.recipes.report.charts import has_charts
from onward.recipes.report.written_files import PAGE
from onward.recipes.run_folder import (
    COMPARISON,
    METRICS,
    RESULTS,
    RunFolder,
    publish_json,
    read_record,
)
from onward.recipes.run_ranks import RunRanks, joined_ranks
from onward.recipes.score_numbers import score_number
from onward.recipes.start_model import from_scratch, has_dropout
from onward.recipes.started_processes import started
from onward.recipes.stop_signals import Stopped, StopSignals
from onward.recipes.tables import Table
from onward.recipes.trainer_switches import shares_of, with_mesh
from onward.reporting import Reporter

if TYPE_CHECKING:
    from onward.recipes.loop import EngineResult
    from onward.recipes.tasks import Baseline

WRITE_ERRORS = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOTEMPTY, errno.EEXIST)


def summary(run: Run) -> str:
    """A few lines about what will run."""
    job, config = run.job, run.job.config
    engines = "onward and torch" if config.compare else config.engine
    start = "random" if from_scratch(config) else "its"
    eval_from = f"{run.eval_tokens} tokens, " if run.eval_tokens else "held out of the train text, "
    unit, words = job.task.unit, getattr(job.model_config.get_text_config(), "vocab_size", None)
    size = f" of {config.block_size}" if unit == "blocks" else ""
    shape = f" x {config.block_size} tokens" if unit == "blocks" else f" {unit}"
    lines = [
        f"task       {config.task}: {job.task.about}",
        f"model      {config.model_name_or_path}, {start} start weights, "
        f"{run.parameters / 1e6:.2f} M parameters"
        + (f", vocabulary {words}" if words is not None else ""),
        f"train      {run.sources[0].source}: {run.train_tokens} tokens, "
        f"{len(job.train)} {unit}{size}",
        f"eval       {run.sources[-1].source}: {eval_from}{len(job.eval)} {unit}",
        *fact_lines(run),
        f"steps      {config.max_steps} updates of {config.gradient_accumulation_steps} x "
        f"{_times(config)}{config.per_device_train_batch_size}{shape}, "
        f"{config.optim} {config.learning_rate:.1e} {config.lr_scheduler_type}, "
        f"{config.warmup_steps} warmup",
        f"engine     {engines}; {versions_line()}",
    ]
    if (device := training_device(config)).type != "cpu":
        lines.append(f"device     {device_line(device)}")
    if config.mesh is not None:
        lines.append(
            f"mesh       {config.mesh}: each process trains "
            f"{config.per_device_train_batch_size} sequences of every micro-batch"
            + (f"; ZeRO {config.zero}" if config.zero else "")
        )
    if config.compare and has_dropout(job.model_config):
        lines.append(
            "dropout    on: the engines draw different masks, so their losses differ by chance "
            "(--dropout 0 compares them exactly)"
        )
    return "\n".join(lines)


def fact_lines(run: Run) -> list[str]:
    """Lines about what the task found in the data, such as the columns that it reads."""
    return [f"data       {fact}" for fact in run.facts]


def _times(config: FinetuneConfig) -> str:
    """The number of processes with rows of their own as a factor; "" where none shares them."""
    return "" if config.mesh is None else f"{shares_of(config.mesh)} x "


def versions() -> dict[str, str]:
    """The versions of the packages that affect the numbers."""
    found = {"python": platform.python_version(), "onward": onward.__version__}
    for name in ("torch", "transformers", "tokenizers", "onnx", "onnxruntime"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def versions_line() -> str:
    """Versions, threads and machine in one line."""
    import torch

    known = versions()
    return (
        f"onward {known['onward']}, torch {known['torch']}, transformers {known['transformers']}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}"
    )


def run_config(run: Run, command: list[str]) -> dict[str, Any]:
    """The content of run_config.json: everything needed to repeat the run."""
    import torch

    return {
        "command": command,
        "options": asdict(run.job.config),
        "versions": versions(),
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": device_line(training_device(run.job.config)),
        },
        "texts": [
            {"source": text.source, "sha256": text.sha256, "characters": len(text)}
            for text in run.sources
        ],
        "blocks_sha256": run.job.sha256(),
        "model_config_sha256": _sha256(run.job.model_config.to_json_string().encode()),
        "random_start": from_scratch(run.job.config),
        "train_tokens": run.train_tokens,
        "eval_tokens": run.eval_tokens,
        "train_samples": len(run.job.train),
        "eval_samples": len(run.job.eval),
        "parameters": run.parameters,
        "baseline": asdict(run.baseline),
    }


def _sha256(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def finetune(config: FinetuneConfig, command: list[str]) -> int:
    """Runs the whole job, or what an earlier call has left of it; progress goes to stderr, results
    to stdout. Returns the exit status.

    command: the command line, to be recorded.
    """
    with (
        StopSignals(tells=not started()[0]) as signals,
        joined_ranks(take_device(config).type) as joined,
    ):
        config = with_mesh(config, joined.ranks)
        ranks = joined.of(config)
        run = _described(config, ranks)
        config = run.job.config
        if ranks.ranks > 1:
            command = ["torchrun", f"--nproc-per-node={ranks.ranks}", "-m", *command]
        print(summary(run), flush=True)
        if config.dry_run:
            if ranks.is_first:
                _dry_run(run)
            return 0
        from onward.kernels.quota import follow_quota
        from onward.recipes.compare import EngineFailed

        follow_quota()  # before the number of threads is recorded
        output = RunFolder(Path(config.output_dir or ""))
        try:
            with output if ranks.is_first else nullcontext():
                return _finetune(run, output, run_config(run, command), signals, ranks)
        except Stopped as stopped:
            print(_how_to_go_on(stopped, output, command), file=sys.stderr)
            output.kept = None  # that line has said it
            return stopped.status
        except EngineFailed as error:
            if error.status < 0:
                raise OnwardError(
                    f"engine {error.engine} was killed by signal {-error.status}, in --compare; "
                    "fix: where memory ran out, lower --per_device_train_batch_size"
                ) from error
            return error.status
        except OSError as error:
            if error.errno not in WRITE_ERRORS:
                raise
            raise OnwardError(
                f"cannot write ({error}), in output folder {str(output.path)!r}; "
                "fix: name another --output_dir"
            ) from error
        finally:
            if output.kept is not None:
                print(f"what was saved is kept in {output.kept}", file=sys.stderr)


def _dry_run(run: Run) -> None:
    """Prints what the first step takes, and the options that were settled as JSON."""
    from onward.recipes.forecast import forecast_lines

    lines, numbers = forecast_lines(run.job)
    print("\n".join(["", *lines, ""]))
    settled = {**asdict(run.job.config), "baseline": asdict(run.baseline), "forecast": numbers}
    print(json.dumps(settled, indent=2))


def _described(config: FinetuneConfig, ranks: RunRanks) -> Run:
    """The run of all ranks, each of which has read the texts. Raises InputError where they have
    read others."""
    run = describe(config)
    if ranks.ranks == 1:
        return run
    job = run.job
    texts: dict[str, Any] = {"train_file": None, "validation_file": None}  # by their content
    named = dataclasses.replace(job.config, output_dir=config.output_dir, **texts)
    ranks.require_alike(
        {
            "command line": str(named),
            "text or tokenizer": job.sha256(),
            "model": _sha256(job.model_config.to_json_string().encode()),
        }
    )
    folder = ranks.from_first(lambda: job.config.output_dir)  # it may be named by the time
    settled = dataclasses.replace(job.config, output_dir=folder)
    return dataclasses.replace(run, job=dataclasses.replace(job, config=settled))


def _finetune(
    run: Run, output: RunFolder, record: dict[str, Any], signals: StopSignals, ranks: RunRanks
) -> int:
    """Runs a described job in its output folder. Returns the exit status."""
    job, config = run.job, run.job.config
    from onward.recipes.compare import comparison, run_both, table
    from onward.recipes.loop import eval_results, reported_results, train
    from onward.recipes.run_checkpoints import RunCheckpoints

    def begin() -> bool:
        output.begin(record, config.overwrite_output_dir)
        return output.is_complete

    if ranks.from_first(begin):
        print(f"\nthe run in {output.path} is complete: nothing is left to do")
        # stopped before the page was there, or without what draws it
        if ranks.is_first and not (output.path / PAGE).is_file() and has_charts():
            _report(run, output.path)
        return 0
    if told := other_numbers(read_record(output.path), record):
        print(f"note: {told}", file=sys.stderr)
    if config.compare:
        signals.status = lambda: "compares the engines, each in a process of its own"
        with tempfile.TemporaryDirectory(prefix="onward-finetune-") as job_folder:
            both = run_both(job, Path(job_folder), output.path)
        _complete(run, output, COMPARISON, comparison(both["onward"], both["torch"]))
        report = table(both["onward"], both["torch"], run.baseline)
    else:
        checkpoints = RunCheckpoints(output.path, config, record, ranks)
        reported = config if ranks.is_first else dataclasses.replace(config, report_to="none")
        with _reporter(reported, output.path, record) as reporter:
            result = train(
                job,
                config.engine,
                output.path,
                checkpoints=checkpoints,
                signals=signals,
                reporter=reporter,
                ranks=ranks,
            )
            results = eval_results(job, result)
            ranks.from_first(lambda: _complete(run, output, RESULTS, results))
            reporter.log(config.max_steps or 1, reported_results(job, result))
        report = single_report(result, run.baseline)
    print(f"\n{report}\n\nwritten to {output.path}")
    if ranks.is_first:
        _report(run, output.path)
    return 0


def _report(run: Run, folder: Path) -> None:
    """Writes what people read of a run that is complete; nothing of it decides whether the run
    succeeds."""
    from onward.recipes.report.text_samples import write_samples

    if run.job.config.task == "causal-lm" and run.job.config.lora_r is None:
        write_samples(folder, run.tokenizer, run.job.eval, run.parameters)
    if run.job.config.task == "text-retrieval":
        _search(run, folder)
    tell_page(folder)


def tell_page(folder: Path) -> None:
    """Writes the page of a run, and prints its path; a page that cannot be written costs a line."""
    from onward.recipes.report.write import report_of_run

    try:
        page = report_of_run(folder)
    except (OnwardError, OSError) as error:
        print(f"note: no report: {error}", file=sys.stderr, flush=True)
        return
    if page is not None:
        print(f"report in {page}")


def _search(run: Run, folder: Path) -> None:
    """Writes an index of the run's documents, and prints what is found for two queries that were
    not trained on."""
    from onward.recipes.search import nearest, shown_hits, write_index
    from onward.recipes.tasks.text_retrieval import pairs_of
    from onward.recipes.tower_settings import LONGEST

    config = run.job.config
    longest = config.max_seq_length or LONGEST
    try:
        tables = [table for table in run.sources if isinstance(table, Table)]
        pairs = [pair for table in tables for pair in pairs_of(table, config)]
        towers, vectors, texts = write_index(folder, run.tokenizer, (d for _, d in pairs), longest)
        print(f"index of {len(texts)} documents in {folder}; onward search {folder} asks it")
        for row in [run.job.eval[i] for i in range(min(2, len(run.job.eval)))]:
            query = str(run.tokenizer.decode(row["input_ids.query"], skip_special_tokens=True))
            hits = nearest(towers, run.tokenizer, query, vectors, texts, 3, longest)
            print("\n".join([f"query: {query}", *shown_hits(hits)]))
    except (OnwardError, OSError) as error:
        print(f"note: no index: {error}", file=sys.stderr, flush=True)


def _complete(run: Run, output: RunFolder, name: str, results: Mapping[str, Any]) -> None:
    """Writes the tokenizer, and the results last of all: where they are, the run is complete."""
    with StagedFiles(output.path) as staged:
        for folder in run.job.task.tokenizer_folders(run.job.model_config):
            run.job.processor.save_pretrained(staged.path / folder)
        staged.publish()
    publish_json(output.path, name, results)


def _reporter(config: FinetuneConfig, folder: Path, record: Mapping[str, Any]) -> Reporter:
    """Sends the metrics of a run in this folder, and its record, where the options ask for it."""
    left_out = ("command", "options", "texts")
    about = {name: value for name, value in record.items() if name not in left_out}

    def tell(line: str) -> None:
        start = "\n" if sys.stderr.isatty() else ""  # behind the bar
        kept = f"{folder / METRICS} has every line"
        print(f"{start}onward finetune: note: {line}; {kept}", file=sys.stderr, flush=True)

    return Reporter(
        config.report_to,
        run_name=config.run_name,
        folder=folder,
        logging_dir=config.logging_dir,
        config={**record["options"], **about},
        tell=tell,
    )


def other_numbers(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Says what of the environment has changed since a run began, so that its numbers may differ
    in their last digits; "" where nothing has."""
    changed = [
        f"{name} {before['versions'].get(name)} then, {version} now"
        for name, version in now["versions"].items()
        if before["versions"].get(name) != version
    ]
    threads = [each["machine"]["threads"] for each in (before, now)]
    if threads[0] != threads[1]:
        changed.append(f"{threads[0]} threads then, {threads[1]} now")
    if not changed:
        return ""
    return f"the run began otherwise ({'; '.join(changed)}): numbers may differ in the last digits"


def _how_to_go_on(stopped: Stopped, output: RunFolder, command: list[str]) -> str:
    """The line about a run that a signal has ended."""
    newest = output.newest
    if newest is None:
        saved = "nothing is saved" if output.kept is None else f"the model is in {output.kept}"
        return f"onward finetune: {stopped}; {saved}"
    words = same_again(command, output.path)
    return f"onward finetune: {stopped}, saved in {newest}; to go on: {shlex.join(words)}"


def same_again(command: Sequence[str], folder: Path) -> list[str]:
    """The command line that goes on with a run in its output folder."""
    words, dropped = list[str](), False
    for word in command:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("--"):
            dropped = name in ("overwrite_output_dir", "resume_from_checkpoint", "output_dir")
        if not dropped:
            words.append(word)
    return [*words, "--output_dir", str(folder)]


def single_report(result: EngineResult, baseline: Baseline) -> str:
    """The report of one engine's results."""
    return "\n".join(
        [
            f"total time          {result.total_s:.1f} s (first step {result.first_step_s:.2f} s)",
            f"tokens/s            {result.tokens_per_second:.0f} after the first step",
            f"peak memory         {result.peak_memory_mib:.0f} MiB",
            f"final train loss    {result.train_loss:.4f} (last 10 updates)",
            f"eval loss           {result.eval_loss:.4f}",
            *(
                f"{name.replace('_', ' '):<19} {score_number(value)}"
                + (f" ({baseline})" if name == baseline.metric else "")
                for name, value in result.scores.items()
            ),
        ]
    )
