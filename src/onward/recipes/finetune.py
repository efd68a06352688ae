"""`onward finetune`: from options to a described run, and the run itself."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onward
from onward.checkpoint import StagedFiles
from onward.errors import OnwardError
from onward.recipes.causal_lm import (
    build_model,
    check_block_size,
    check_model_name,
    check_positions,
    check_vocabulary,
    from_scratch,
    has_dropout,
    load_model_config,
    load_tokenizer,
    preset_config,
    require_hf,
    scratch_config,
    set_dropout,
    weight_files,
)
from onward.recipes.corpus import (
    Ids,
    Text,
    blocks,
    encode,
    python_library,
    read_text_file,
    split_blocks,
    train_tokenizer,
    unigram_perplexity,
)
from onward.recipes.gpt2 import PRESETS
from onward.recipes.model_size import parameter_count
from onward.recipes.options import FinetuneConfig, InputError, VerifyConfig, check_options
from onward.recipes.run_folder import (
    COMPARISON,
    METRICS,
    RESULTS,
    RunFolder,
    publish_json,
    read_record,
)
from onward.recipes.run_ranks import RunRanks, joined_ranks
from onward.recipes.started_processes import started
from onward.recipes.stop_signals import Stopped, StopSignals
from onward.recipes.trainer_switches import shares_of, with_mesh
from onward.reporting import Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from onward.recipes.loop import EngineResult, Job

BUILT_IN_STEPS = 150
FILE_EPOCHS = 3.0
LOADED_LEARNING_RATE = 5e-5
WRITE_ERRORS = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOTEMPTY, errno.EEXIST)


@dataclass(frozen=True)
class Run:
    """A described run: everything is decided, nothing is written yet.

    job: resolved options, model configuration, blocks.
    texts: those read. train_tokens, eval_tokens: numbers of tokens before they are cut into blocks;
        eval_tokens is 0 if the eval blocks were held out of the train text.
    parameters: number of weights. unigram: perplexity of the unigram model.
    """

    job: Job
    tokenizer: PreTrainedTokenizerBase
    texts: tuple[Text, ...]
    train_tokens: int
    eval_tokens: int
    parameters: int
    unigram: float


def describe(config: FinetuneConfig) -> Run:
    """Reads and checks everything, and writes nothing. Raises InputError or MissingExtraError."""
    check_options(config)
    check_model_name(config)
    scratch = from_scratch(config)
    if scratch:
        if config.config_overrides is None:
            check_positions(PRESETS[config.model_name_or_path].positions, config.block_size)
        else:
            require_hf()
            preset_config(config, PRESETS[config.model_name_or_path].vocab_size)
    elif config.vocab_size is not None:
        raise InputError(
            "vocab_size is for a model from scratch",
            f"in --vocab_size with model {config.model_name_or_path!r}",
            "leave it out",
        )
    elif config.config_overrides is not None:
        raise InputError(
            "config_overrides are for a model from scratch",
            f"in --config_overrides with model {config.model_name_or_path!r}",
            "leave it out",
        )
    texts = _read_texts(config)
    require_hf()
    # the run prints what matters; transformers' notes would break the progress bar
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    from onward.recipes.loop import Job

    model_config = None
    if not scratch:
        model_config = load_model_config(config)
        check_block_size(model_config, config.block_size)
    tokenizer = load_tokenizer(config)
    if tokenizer is None:
        preset = PRESETS[config.model_name_or_path]
        tokenizer = train_tokenizer(
            texts[0].documents, config.vocab_size or preset.vocab_size, preset.positions
        )
    if model_config is None:
        model_config = scratch_config(config, tokenizer)
    if config.dropout is not None:
        set_dropout(model_config, config.dropout)

    train_text = texts[0]
    train_ids = encode(tokenizer, train_text.documents)
    train_blocks = _blocks(train_ids, config.block_size, train_text.source)
    eval_tokens = 0
    if len(texts) > 1:
        eval_ids = encode(tokenizer, texts[-1].documents)
        eval_tokens = len(eval_ids)
        eval_blocks = _blocks(eval_ids, config.block_size, texts[-1].source)
    else:
        train_blocks, eval_blocks = _hold_out(train_blocks, len(train_ids), train_text.source)
    train_blocks = train_blocks[: config.max_train_samples]
    eval_blocks = eval_blocks[: config.max_eval_samples]
    check_vocabulary(model_config, (train_blocks, eval_blocks), tokenizer)
    config = _resolve(config, len(train_blocks), scratch)
    return Run(
        job=Job(config, model_config, train_blocks, eval_blocks),
        tokenizer=tokenizer,
        texts=texts,
        train_tokens=len(train_ids),
        eval_tokens=eval_tokens,
        parameters=parameter_count(config.model_name_or_path, model_config, weight_files(config)),
        unigram=unigram_perplexity(
            train_blocks, eval_blocks, model_config.get_text_config().vocab_size
        ),
    )


def _read_texts(config: FinetuneConfig) -> tuple[Text, ...]:
    """Reads the (train, eval) texts, or only the train text if eval blocks are held out of it."""
    if config.train_file is None:
        return python_library(config.corpus_bytes)
    train = read_text_file(Path(config.train_file), "train_file")
    if config.validation_file is None:
        return (train,)
    return train, read_text_file(Path(config.validation_file), "validation_file")


def _blocks(ids: Ids, block_size: int, source: str) -> Ids:
    cut = blocks(ids, block_size)
    if not len(cut):
        raise InputError(
            f"text of {len(ids)} tokens is shorter than one block of {block_size}",
            f"in {source}",
            "give more text, or a smaller --block_size",
        )
    return cut


def _hold_out(train_blocks: Ids, tokens: int, source: str) -> tuple[Ids, Ids]:
    if len(train_blocks) < 2:
        raise InputError(
            f"the text of {tokens} tokens fills only one block of {train_blocks.shape[1]} "
            "tokens, which leaves none for evaluation",
            f"in {source}",
            "give more text, a smaller --block_size, or a --validation_file",
        )
    return split_blocks(train_blocks)


def _resolve(config: FinetuneConfig, train_blocks: int, scratch: bool) -> FinetuneConfig:
    """Fills in options that depend on the data and the model. Raises InputError where the text is
    too short."""
    per_update = config.per_device_train_batch_size * config.gradient_accumulation_steps
    per_update *= shares_of(config.mesh)
    if train_blocks < per_update:
        raise InputError(
            f"{train_blocks} train blocks of {config.block_size} tokens do not fill one update of "
            f"{per_update}",
            "in the train text",
            "give more text, or lower --per_device_train_batch_size or --block_size",
        )
    steps = config.max_steps
    if steps is None and config.num_train_epochs is None and config.train_file is None:
        steps = BUILT_IN_STEPS
    if steps is None:
        steps = math.ceil((config.num_train_epochs or FILE_EPOCHS) * (train_blocks // per_update))
    rate = config.learning_rate
    if rate is None:
        preset = PRESETS.get(config.model_name_or_path)
        rate = preset.learning_rate if scratch and preset else LOADED_LEARNING_RATE
    warmup = config.warmup_steps
    if config.warmup_ratio:
        warmup = math.ceil(steps * config.warmup_ratio)
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    return dataclasses.replace(
        config,
        max_steps=steps,
        warmup_steps=warmup,
        learning_rate=rate,
        max_grad_norm=config.max_grad_norm or None,
        output_dir=config.output_dir or f"runs/finetune-{now}",
    )


def summary(run: Run) -> str:
    """A few lines about what will run."""
    job, config = run.job, run.job.config
    engines = "onward and torch" if config.compare else config.engine
    start = "random" if from_scratch(config) else "its"
    eval_from = f"{run.eval_tokens} tokens, " if run.eval_tokens else "held out of the train text, "
    lines = [
        f"model      {config.model_name_or_path}, {start} start weights, "
        f"{run.parameters / 1e6:.2f} M parameters, "
        f"vocabulary {job.model_config.get_text_config().vocab_size}",
        f"train      {run.texts[0].source}: {run.train_tokens} tokens, "
        f"{len(job.train_blocks)} blocks of {config.block_size}",
        f"eval       {run.texts[-1].source}: {eval_from}{len(job.eval_blocks)} blocks",
        f"steps      {config.max_steps} updates of {config.gradient_accumulation_steps} x "
        f"{_times(config)}{config.per_device_train_batch_size} x {config.block_size} tokens, "
        f"AdamW {config.learning_rate:.1e} {config.lr_scheduler_type}, "
        f"{config.warmup_steps} warmup",
        f"engine     {engines}; {versions_line()}",
    ]
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
        },
        "texts": [
            {"source": text.source, "sha256": text.sha256, "characters": len(text)}
            for text in run.texts
        ],
        "blocks_sha256": _sha256(run.job.train_blocks, run.job.eval_blocks),
        "model_config_sha256": _sha256(run.job.model_config.to_json_string().encode()),
        "random_start": from_scratch(run.job.config),
        "train_tokens": run.train_tokens,
        "eval_tokens": run.eval_tokens,
        "train_blocks": len(run.job.train_blocks),
        "eval_blocks": len(run.job.eval_blocks),
        "parameters": run.parameters,
        "unigram_perplexity": run.unigram,
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
    with StopSignals(tells=not started()[0]) as signals, joined_ranks() as joined:
        config = with_mesh(config, joined.ranks)
        ranks = joined.of(config)
        run = _described(config, ranks)
        config = run.job.config
        if ranks.ranks > 1:
            command = ["torchrun", f"--nproc-per-node={ranks.ranks}", "-m", *command]
        print(summary(run), flush=True)
        if config.dry_run:
            print(json.dumps({**asdict(config), "unigram_perplexity": run.unigram}, indent=2))
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
            "text or tokenizer": _sha256(job.train_blocks, job.eval_blocks),
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
        return 0
    if told := other_numbers(read_record(output.path), record):
        print(f"note: {told}", file=sys.stderr)
    if config.compare:
        signals.status = lambda: "compares the engines, each in a process of its own"
        with tempfile.TemporaryDirectory(prefix="onward-finetune-") as job_folder:
            both = run_both(job, Path(job_folder), output.path)
        _complete(run, output, COMPARISON, comparison(both["onward"], both["torch"]))
        report = table(both["onward"], both["torch"], run.unigram)
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
            reporter.log(config.max_steps or 1, reported_results(results))
        report = single_report(result, run.unigram)
    print(f"\n{report}\n\nwritten to {output.path}")
    if ranks.is_first:
        _report(run, output.path)
    return 0


def _report(run: Run, folder: Path) -> None:
    """Writes what people read of a run that is complete; nothing of it decides whether the run
    succeeds."""
    from onward.recipes.report.text_samples import write_samples
    from onward.recipes.report.write import report_of_run

    write_samples(folder, run.tokenizer, run.job.eval_blocks, run.parameters)
    try:
        page = report_of_run(folder)
    except (OnwardError, OSError) as error:
        print(f"note: no report: {error}", file=sys.stderr, flush=True)
        return
    if page is not None:
        print(f"report in {page}")


def _complete(run: Run, output: RunFolder, name: str, results: Mapping[str, Any]) -> None:
    """Writes the tokenizer, and the results last of all: where they are, the run is complete."""
    with StagedFiles(output.path) as staged:
        run.tokenizer.save_pretrained(staged.path)
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
        return f"onward finetune: {stopped}; nothing is saved"
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


def single_report(result: EngineResult, unigram: float) -> str:
    """The report of one engine's results."""
    return "\n".join(
        [
            f"total time          {result.total_s:.1f} s (first step {result.first_step_s:.2f} s)",
            f"tokens/s            {result.tokens_per_second:.0f} after the first step",
            f"peak memory         {result.peak_rss_mib:.0f} MiB",
            f"final train loss    {result.train_loss:.4f} (last 10 updates)",
            f"eval loss           {result.eval_loss:.4f}",
            f"perplexity          {result.perplexity:.2f} (unigram model {unigram:.2f})",
        ]
    )


def verify(config: VerifyConfig) -> int:
    """Compares Onward's first step of the described run with its references; returns 1 if they
    differ."""
    if config.mesh is not None or config.zero:
        raise InputError(
            "verify compares a step of one process", "in --mesh or --zero", "leave them out"
        )
    config = dataclasses.replace(config, output_dir=None)
    run = describe(config)
    import torch

    from onward.recipes.engines import adamw, onward_trainer
    from onward.recipes.stages import StageLine

    job = run.job
    model = build_model(job.config, job.model_config)
    model.config.use_cache = False
    trainer = onward_trainer(model, adamw(model, job.config), job.config)
    rows = job.train_blocks[: job.config.per_device_train_batch_size]
    input_ids = torch.from_numpy(rows).to(torch.int64)
    batch = {"input_ids": input_ids, "labels": input_ids}
    with StageLine("verify"):
        report = trainer.verify(batch, bisect=config.bisect)
    print(report)
    return 0 if report.ok else 1
