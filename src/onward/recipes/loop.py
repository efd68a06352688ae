"""One engine's run over prepared blocks: updates, evaluation, and saving."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import AutoConfig, get_scheduler

from onward.checkpoint import StagedFiles
from onward.checkpoint.tensor_file import tensor_bytes
from onward.data import ResumableDataLoader
from onward.errors import OnwardError
from onward.recipes.causal_lm import build_model
from onward.recipes.corpus import Ids
from onward.recipes.engines import ENGINES, LoopTrainer, adamw
from onward.recipes.options import FinetuneConfig
from onward.recipes.progress import Progress, peak_rss_mib, perplexity, reset_peak_rss, rss_mib
from onward.recipes.report.step_facts import write_step_facts
from onward.recipes.run_checkpoints import RunCheckpoints, RunHistory
from onward.recipes.run_folder import METRICS, write_json
from onward.recipes.run_ranks import RunRanks
from onward.recipes.stages import StageLine
from onward.recipes.stop_signals import Stopped, StopSignals
from onward.recipes.trainer_switches import least_rows
from onward.reporting import Reporter
from onward.train import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

IGNORED_LABEL = -100


class TrainingError(OnwardError):
    """Raised if a valid run cannot continue."""


@dataclass(frozen=True)
class Job:
    """Everything that an engine needs for a run, so that two processes can train the same.

    config: with max_steps and learning_rate filled in. train_blocks, eval_blocks:
    `i32[blocks, block_size]`.
    """

    config: FinetuneConfig
    model_config: PreTrainedConfig
    train_blocks: Ids
    eval_blocks: Ids

    def save(self, folder: Path) -> None:
        """Writes the job for another process."""
        write_json(folder / "options.json", asdict(self.config))
        self.model_config.save_pretrained(folder)
        np.save(folder / "train.npy", self.train_blocks, allow_pickle=False)
        np.save(folder / "eval.npy", self.eval_blocks, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> Job:
        """Reads a job written by `save`."""
        options = json.loads((folder / "options.json").read_text(encoding="utf-8"))
        return cls(
            FinetuneConfig(**options),
            AutoConfig.from_pretrained(folder),
            np.load(folder / "train.npy", allow_pickle=False),
            np.load(folder / "eval.npy", allow_pickle=False),
        )


@dataclass(frozen=True)
class EngineResult:
    """The results of one engine.

    step_losses: of every update, mean over its micro-batches, nats per token.
    first_step_s: building the engine and the first update, seconds.
    train_s, eval_s: all updates (the first too); the evaluation; seconds.
    tokens_per_second: over all updates but the first.
    base_rss_mib, peak_rss_mib: memory before the model was built; the peak while training; MiB.
    start_weights_sha256: of the weights before the first update.
    """

    engine: str
    step_losses: tuple[float, ...]
    first_step_s: float
    train_s: float
    eval_s: float
    tokens_per_second: float
    base_rss_mib: float
    peak_rss_mib: float
    eval_loss: float
    start_weights_sha256: str

    @property
    def perplexity(self) -> float:
        """exp of the evaluation loss."""
        return perplexity(self.eval_loss)

    @property
    def train_loss(self) -> float:
        """Mean loss of the last ten updates, since one batch's loss says little."""
        last = self.step_losses[-10:]
        return sum(last) / len(last)

    @property
    def total_s(self) -> float:
        """Seconds of training and evaluation."""
        return self.train_s + self.eval_s


class TokenBlocks(Dataset[NDArray[np.int32]]):
    """Blocks of tokens `i32[blocks, block_size]` as a dataset of rows."""

    def __init__(self, blocks: Ids) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self._blocks[index]


def update_batches(blocks: Ids, per_update: int, seed: int) -> ResumableDataLoader:
    """Batches `i64[per_update, block_size]`, one for each update, in a new permutation for each
    epoch. Blocks that do not fill a whole update are left out of that epoch."""
    return ResumableDataLoader(
        TokenBlocks(blocks), per_update, seed=seed, drop_last=True, collate_fn=_stacked
    )


def _stacked(rows: list[NDArray[np.int32]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def train(
    job: Job,
    engine_name: str,
    folder: Path,
    *,
    save_model: bool = True,
    checkpoints: RunCheckpoints | None = None,
    signals: StopSignals | None = None,
    reporter: Reporter | None = None,
    ranks: RunRanks | None = None,
) -> EngineResult:
    """Runs the job with one engine; writes metrics and the model into `folder`.

    checkpoints: those of the run, from which it goes on; None saves none. signals: those that may
    end the run, by raising Stopped. reporter: gets the metrics too. ranks: the processes that train
    together, each of which calls this; rank 0 writes.
    """
    ranks = RunRanks() if ranks is None else ranks
    config = job.config
    base_rss = rss_mib()
    if checkpoints is None:
        unsaved = replace(config, save_strategy="no", resume_from_checkpoint=None)
        checkpoints = RunCheckpoints(folder, unsaved, {})
    signals = signals or StopSignals()
    model = build_model(config, job.model_config)
    history = RunHistory(checkpoints.record, weights_sha256(model), ranks)
    # the key/value cache serves generation; in training it only costs memory
    as_loaded = partial(_use_cache, model, getattr(model.config, "use_cache", None))
    with _use_cache(model, False):
        trainer = _updates(
            job, engine_name, model, history, checkpoints, signals, reporter, as_loaded, ranks
        )
        peak_rss = peak_rss_mib()
        started = time.perf_counter()
        with StageLine(f"{engine_name}: evaluation"):
            size = config.per_device_eval_batch_size
            eval_loss = evaluate(trainer, job.eval_blocks, size, ranks, least_rows(config))
    result = EngineResult(
        engine=engine_name,
        step_losses=tuple(history.step_losses),
        first_step_s=history.first_steps_s[0],
        train_s=history.train_s,
        eval_s=time.perf_counter() - started,
        tokens_per_second=_tokens_per_second(config, history, ranks.mesh.batches),
        base_rss_mib=base_rss,
        peak_rss_mib=peak_rss,
        eval_loss=eval_loss,
        start_weights_sha256=history.start_weights_sha256,
    )
    if save_model:
        if isinstance(trainer, Trainer) and ranks.ranks == 1:
            write_step_facts(trainer, folder)
        if isinstance(trainer, Trainer):
            trainer.gather()  # by all ranks, before one of them writes
        ranks.from_first(lambda: _save_model(trainer, model, folder, config.export_dtype))
    return result


def _save_model(trainer: LoopTrainer, model: PreTrainedModel, folder: Path, dtype: str) -> None:
    """Writes the model as transformers keeps it, and as ONNX with products of this type."""
    with StagedFiles(folder) as staged:
        model.save_pretrained(staged.path)
        staged.publish()
    if isinstance(trainer, Trainer):
        with StagedFiles(folder) as staged:
            trainer.export_onnx(staged.path / "model.onnx", dtype=dtype)
            staged.publish()


@contextmanager
def _use_cache(model: PreTrainedModel, value: bool | None) -> Generator[None]:
    """A context in which the model's configuration has this `use_cache`."""
    before = getattr(model.config, "use_cache", None)
    model.config.use_cache = value
    try:
        yield
    finally:
        model.config.use_cache = before


def _updates(
    job: Job,
    engine_name: str,
    model: PreTrainedModel,
    history: RunHistory,
    checkpoints: RunCheckpoints,
    signals: StopSignals,
    reporter: Reporter | None,
    as_loaded: Callable[[], AbstractContextManager[None]],
    ranks: RunRanks,
) -> LoopTrainer:
    """Runs the updates that are left to do, and adds them to `history`. Returns the trainer.

    as_loaded: makes a context in which the model's configuration is that of the user. Raises
    TrainingError for a loss that is not finite, and Stopped where a signal asked for it: then a
    checkpoint was written, unless none ever is.
    """
    config = job.config
    updates = config.max_steps or 1
    micro, accumulate = config.per_device_train_batch_size, config.gradient_accumulation_steps
    torch.manual_seed(config.seed)
    optimizer = adamw(model, config)
    reset_peak_rss()
    started = time.perf_counter()
    trainer = ENGINES[engine_name](model, optimizer, config)
    scheduler = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=updates,
    )
    per_update = micro * accumulate * ranks.mesh.batches
    batches = update_batches(job.train_blocks, per_update, config.seed)
    trainer.register_for_checkpointing(history, scheduler, batches)
    found = checkpoints.resume(trainer, history)
    if found is not None:
        print(f"{engine_name}: goes on from {found}", file=sys.stderr, flush=True)
    before, first = history.train_s, history.steps + 1
    progress = Progress(
        engine_name,
        checkpoints.folder / METRICS if ranks.is_first else None,
        updates,
        len(batches),
        per_update * config.block_size,
        config.logging_steps,
        history.step_losses,
        before + time.perf_counter() - started,
        reporter,
    )
    signals.status = progress.status
    with progress, signals.deferred():
        for step, batch in zip(range(first, updates + 1), _endless(batches), strict=False):
            learning_rate = float(optimizer.param_groups[0]["lr"])
            loss, grad_norm, skipped = _update(trainer, ranks.shares(batch, micro))
            if not skipped:
                scheduler.step()
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss}, at update {step} with engine {engine_name}; "
                    f"fix: lower --learning_rate (it was {learning_rate:.2e}) or raise "
                    "--warmup_steps"
                )
            history.train_s = before + time.perf_counter() - started
            if step == first:
                history.first_steps_s.append(history.train_s - before)
            progress.update(step, loss, grad_norm, learning_rate)
            ends_epoch, is_last = not batches.samples, step == updates
            if not is_last and _is_evaluated(config, step, ends_epoch):
                began = time.perf_counter()
                with progress.paused():
                    size = config.per_device_eval_batch_size
                    held = evaluate(trainer, job.eval_blocks, size, ranks, least_rows(config))
                if not math.isfinite(held):
                    raise TrainingError(
                        f"the evaluation loss is {held}, after update {step} with engine "
                        f"{engine_name}; fix: lower --learning_rate or raise --warmup_steps"
                    )
                progress.evaluated(step, held)
                started += time.perf_counter() - began  # of no update
            # read once: what comes later is for the next update
            stopping = ranks.largest(signals.stopping or 0) or None
            if checkpoints.is_due(step, ends_epoch, is_last, stopping is not None):
                with progress.paused(), as_loaded():
                    checkpoints.save(trainer, step)
            if stopping is not None:
                raise Stopped(stopping)
    signals.status = lambda: f"{engine_name}: {updates} updates are done; evaluates and saves"
    return trainer


def _is_evaluated(config: FinetuneConfig, step: int, ends_epoch: bool) -> bool:
    """Whether the model is evaluated after update number `step` (from 1)."""
    if config.eval_strategy == "epoch":
        return ends_epoch
    every = config.eval_steps or config.logging_steps
    return config.eval_strategy == "steps" and step % every == 0


def _endless(batches: ResumableDataLoader) -> Iterator[torch.Tensor]:
    """The batches that are left of the epoch, and those of the epochs after it."""
    while True:
        yield from batches


def _update(
    trainer: LoopTrainer, micro_batches: Sequence[torch.Tensor]
) -> tuple[float, float | None, bool]:
    """Makes one optimizer update from micro-batches `i64[B,T]`.

    Returns the mean of their losses (nats per token), the gradient's global 2-norm before clipping
    (None where it is not computed or not finite), and whether the update was skipped because a
    gradient was infinite or NaN.
    """
    total, norm, skipped = 0.0, None, False
    for input_ids in micro_batches:
        step = trainer.train_step(input_ids=input_ids, labels=input_ids)
        total += float(step.loss)
        norm, skipped = step.grad_norm, step.skipped
    found = None if norm is None or not math.isfinite(float(norm)) else float(norm)
    return total / len(micro_batches), found, skipped


def evaluate(
    trainer: LoopTrainer,
    eval_blocks: Ids,
    batch_size: int,
    ranks: RunRanks | None = None,
    least: int = 1,
) -> float:
    """Mean loss over all predicted tokens of the blocks `i32[blocks,T]`, nats per token.

    The last batch is padded with ignored rows, so that one shape serves all batches, and all
    batches have at least `least` rows. Each rank takes other batches, except for those that share
    weights, and the result is that of one process: to the bit where every rank has all weights.
    """
    ranks = RunRanks() if ranks is None else ranks
    starts = range(0, len(eval_blocks), batch_size)
    size = max(min(batch_size, len(eval_blocks)), least)
    found: dict[int, float] = {}
    for place, counts in ranks.evaluates(len(starts)):
        start = starts[place]
        rows = torch.from_numpy(eval_blocks[start : start + batch_size].astype(np.int64))
        real = len(rows)
        if real < size:
            rows = torch.cat([rows, rows[:1].expand(size - real, -1)])
        labels = rows.clone()
        labels[real:] = IGNORED_LABEL
        loss = float(trainer.eval_step(input_ids=rows, labels=labels).loss)
        if counts:
            found[place] = real * loss
    total = 0.0
    for loss in ranks.joined(found, len(starts)):
        total += loss
    return total / len(eval_blocks)


def eval_results(job: Job, result: EngineResult) -> dict[str, float | int | str]:
    """The content of eval_results.json, with the names of Hugging Face's examples."""
    return {
        "engine": result.engine,
        "eval_loss": result.eval_loss,
        "perplexity": result.perplexity,
        "eval_samples": len(job.eval_blocks),
        "eval_runtime": result.eval_s,
        "train_loss": result.train_loss,
        "train_runtime": result.train_s,
        "train_samples": len(job.train_blocks),
        "first_step_s": result.first_step_s,
        "tokens_per_second": result.tokens_per_second,
        "peak_rss_mib": result.peak_rss_mib,
        "base_rss_mib": result.base_rss_mib,
        "start_weights_sha256": result.start_weights_sha256,
    }


# A run's results at services, where the names of its metrics lines mean something else.
_REPORTED_AS = {"perplexity": "eval_perplexity", "tokens_per_second": "train_tokens_per_second"}


def reported_results(results: Mapping[str, float | int | str]) -> dict[str, float | int]:
    """The numbers of `eval_results`, by names that no metrics line has."""
    return {
        _REPORTED_AS.get(name, name): value
        for name, value in results.items()
        if not isinstance(value, str)
    }


def weights_sha256(model: torch.nn.Module) -> str:
    """The SHA-256 of the names and bytes of all weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor_bytes(tensor).numpy().data)
    return digest.hexdigest()


def _tokens_per_second(config: FinetuneConfig, history: RunHistory, shares: int) -> float:
    """Tokens per second of all shares, over all updates but the first of each process."""
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    tokens = rows * config.block_size * shares
    firsts = history.first_steps_s
    if history.steps == len(firsts):
        return tokens * len(firsts) / sum(firsts)
    return tokens * (history.steps - len(firsts)) / (history.train_s - sum(firsts))
