"""One engine's run over prepared samples: updates, evaluation, and saving."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from onward.checkpoint import StagedFiles, folder_name
from onward.data import ResumableDataLoader
from onward.data.order import Place, SeededDataset
from onward.errors import OnwardError
from onward.fitting.schedules import named_schedule
from onward.model_state.device import device_of
from onward.prepare.batch import bind_batch
from onward.recipes.best_weights import BestWeights
from onward.recipes.devices import (
    moved,
    peak_mib,
    reset_peak,
    take_device,
    telling_shortages,
)
from onward.recipes.engines import ENGINES, LoopTrainer
from onward.recipes.generated_texts import generated_texts, text_scores, write_texts
from onward.recipes.optimizers import optimizer_of
from onward.recipes.options import FinetuneConfig
from onward.recipes.processors import saved_processor
from onward.recipes.progress import Progress, peak_rss_mib, reset_peak_rss, rss_mib
from onward.recipes.report.step_facts import write_step_facts
from onward.recipes.run_checkpoints import RunCheckpoints, RunHistory
from onward.recipes.run_folder import METRICS, write_json
from onward.recipes.run_ranks import RunRanks
from onward.recipes.samples import Row, Samples
from onward.recipes.sound_processor import tokenizer_of
from onward.recipes.stages import StageLine
from onward.recipes.start_model import build_model, from_scratch
from onward.recipes.stop_signals import Stopped, StopSignals
from onward.recipes.tasks import IGNORED_LABEL, Batch, Collate, Task, task_of
from onward.recipes.trainer_switches import least_rows
from onward.recipes.weights_digest import weights_sha256
from onward.reporting import Reporter
from onward.train import Trainer
from onward.train.export import export_onnx
from onward.train.low_export import read_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_SMALLER = "lower --per_device_train_batch_size, and raise --gradient_accumulation_steps as much"
_SMALLER_EVALUATION = "lower --per_device_eval_batch_size"


class TrainingError(OnwardError):
    """Raised if a valid run cannot continue."""


class DrawnSamples(Dataset[Row]):
    """Samples as a task draws them at random, such as the tokens that it hides."""

    def __init__(self, samples: Samples, draw: Callable[[Row], Row]) -> None:
        self._samples, self._draw = samples, draw

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Row:
        return self._draw(self._samples[index])


@dataclass(frozen=True)
class Job:
    """Everything that an engine needs for a run, so that two processes can train the same.

    config: with max_steps and learning_rate filled in. processor: what makes the model's inputs, a
    tokenizer where those are texts (see `Task.inputs`).
    """

    config: FinetuneConfig
    model_config: PreTrainedConfig
    train: Samples
    eval: Samples
    processor: Any

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; for tasks with images the image processor, which takes its place."""
        return tokenizer_of(self.processor)

    @property
    def task(self) -> Task:
        """What the run learns."""
        return task_of(self.config)

    def drawn(self, samples: Samples) -> DrawnSamples:
        """The job's samples, as the task draws them."""
        draw = self.task.draw(samples, self.processor, self.config)
        return DrawnSamples(samples, draw)

    def collate(self) -> Collate:
        """Makes the function that makes a batch of samples."""
        return self.task.collate(self.processor, self.config)

    def first_batch(self, samples: Samples, size: int) -> Batch:
        """A batch of the first samples, at most so many."""
        drawn = self.drawn(samples)
        return self.collate()([drawn[index] for index in range(min(size, len(samples)))])

    def sha256(self) -> str:
        """The SHA-256 of all samples."""
        digest = hashlib.sha256()
        for part in (self.train, self.eval):
            if self.task.unit == "blocks":
                digest.update(part.blocks.data)
            else:
                digest.update(part.sha256().encode())
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """Writes the job for another process."""
        write_json(folder / "options.json", asdict(self.config))
        self.model_config.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        self.train.save(folder / "train.npz")
        self.eval.save(folder / "eval.npz")

    @classmethod
    def load(cls, folder: Path) -> Job:
        """Reads a job written by `save`."""
        from transformers import AutoConfig

        options = json.loads((folder / "options.json").read_text(encoding="utf-8"))
        config = FinetuneConfig(**options)
        model_config: Any = AutoConfig.from_pretrained(folder)
        # not this folder's, which is another one each time: a kept capture is of one name
        model_config.name_or_path = "" if from_scratch(config) else config.model_name_or_path
        return cls(
            config,
            model_config,
            Samples.load(folder / "train.npz"),
            Samples.load(folder / "eval.npz"),
            saved_processor(folder, task_of(config)),
        )


@dataclass(frozen=True)
class EngineResult:
    """The results of one engine.

    step_losses: of every update, mean over its labels (of language models nats per token).
    first_step_s: building the engine and the first update, seconds.
    train_s, eval_s: all updates (the first too); the evaluation; seconds.
    tokens_per_second: over all updates but the first, without padding.
    base_rss_mib, peak_rss_mib: memory before the model was built; the peak while training; MiB.
    start_weights_sha256: of the weights before the first update. scores: of the evaluation.
    peak_device_mib: the peak of a GPU's memory while training, MiB; None on the CPU.
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
    scores: dict[str, float] = field(default_factory=dict)
    peak_device_mib: float | None = None

    @property
    def peak_memory_mib(self) -> float:
        """The peak of the memory that the run trains in, MiB: a GPU's, or the process's."""
        return self.peak_rss_mib if self.peak_device_mib is None else self.peak_device_mib

    @property
    def train_loss(self) -> float:
        """Mean loss of the last ten updates, since one batch's loss says little."""
        last = self.step_losses[-10:]
        return sum(last) / len(last)

    @property
    def total_s(self) -> float:
        """Seconds of training and evaluation."""
        return self.train_s + self.eval_s


def update_batches(
    samples: Dataset[Row], per_update: int, seed: int, workers: int = 0
) -> ResumableDataLoader:
    """The samples of each update, as rows, in a new permutation for each epoch. Those that do not
    fill a whole update are left out of that epoch."""
    return ResumableDataLoader(
        samples, per_update, seed=seed, drop_last=True, collate_fn=list, num_workers=workers
    )


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
    model = job.task.settled(build_model(config, job.model_config), job.processor)
    history = RunHistory(checkpoints.record, weights_sha256(model), ranks)
    device = take_device(config)
    model_of: Any = model
    with telling_shortages(device, "for the weights of the model", "--use_cpu true"):
        model_of.to(device)
    # the key/value cache serves generation; in training it only costs memory
    as_loaded = partial(_use_cache, model, getattr(model.config, "use_cache", None))
    with _use_cache(model, False):
        trainer = _updates(
            job, engine_name, model, history, checkpoints, signals, reporter, as_loaded, ranks
        )
        peak_rss, peak_device = peak_rss_mib(), peak_mib(device)
        if save_model:  # before an evaluation, which may fail
            if isinstance(trainer, Trainer):
                trainer.gather()  # by all ranks, before one of them writes
            with as_loaded():
                ranks.from_first(lambda: _save_model(trainer, model, folder, job))
        started = time.perf_counter()
        with StageLine(f"{engine_name}: evaluation"):
            eval_loss, scores = evaluate(trainer, job, ranks)
        if config.predict_with_generate:
            with as_loaded(), StageLine(f"{engine_name}: texts"):
                scores |= _generated(trainer, model, job, folder, ranks)
    result = EngineResult(
        engine=engine_name,
        step_losses=tuple(history.step_losses),
        first_step_s=history.first_steps_s[0],
        train_s=history.train_s,
        eval_s=time.perf_counter() - started,
        tokens_per_second=_tokens_per_second(history),
        base_rss_mib=base_rss,
        peak_rss_mib=peak_rss,
        peak_device_mib=peak_device,
        eval_loss=eval_loss,
        start_weights_sha256=history.start_weights_sha256,
        scores=scores,
    )
    if save_model and isinstance(trainer, Trainer):
        if ranks.ranks == 1:
            write_step_facts(trainer, folder)
        trainer.gather()  # the evaluation has taken the weights apart again
    return result


def _generated(
    trainer: LoopTrainer, model: PreTrainedModel, job: Job, folder: Path, ranks: RunRanks
) -> dict[str, float]:
    """Writes the model's texts for the samples to evaluate on; returns their scores."""
    if isinstance(trainer, Trainer):
        trainer.gather()  # by all ranks, before one of them reads weights

    def write() -> dict[str, float]:
        texts = generated_texts(model, job.task, job.eval, job.processor, job.config)
        write_texts(folder, texts)
        return text_scores(texts)

    return ranks.from_first(write)


def _save_model(trainer: LoopTrainer, model: PreTrainedModel, folder: Path, job: Job) -> None:
    """Writes the model with its tokenizer as transformers keeps them, and as ONNX with products of
    the type that the options name."""
    with StagedFiles(folder) as staged:
        model.save_pretrained(staged.path)
        if job.config.lora_r is not None:  # of which the adapters alone were written
            model.config.save_pretrained(staged.path)
        for name in job.task.tokenizer_folders(job.model_config):
            job.processor.save_pretrained(staged.path / name)
        staged.publish()
    if isinstance(trainer, Trainer):
        batch = moved(job.first_batch(job.eval, 2), device_of(model))
        with StagedFiles(folder) as staged:
            for name, (part, inputs) in job.task.exports(batch, model).items():
                path = staged.path / name
                path.parent.mkdir(exist_ok=True)
                if part is model:
                    trainer.export_onnx(path, inputs, dtype=job.config.export_dtype)
                else:
                    example = bind_batch((), dict(inputs), has_loss=False)
                    export_onnx(part.eval(), example, path, read_dtype(job.config.export_dtype))
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
    optimizer = optimizer_of(model, config)
    reset_peak_rss()
    device = device_of(model)
    reset_peak(device)
    started = time.perf_counter()
    trainer = ENGINES[engine_name](model, optimizer, config)
    scheduler = named_schedule(config.lr_scheduler_type, optimizer, config.warmup_steps, updates)
    per_update = micro * accumulate * ranks.mesh.batches
    task, collate = job.task, job.collate()
    batches = update_batches(
        job.drawn(job.train), per_update, config.seed, config.dataloader_num_workers
    )
    best = BestWeights(config)
    # others have checkpoints without one
    judged = [best] if best.is_asked else []
    trainer.register_for_checkpointing(history, scheduler, batches, *judged)
    found = checkpoints.resume(trainer, history)
    if found is not None:
        print(f"{engine_name}: goes on from {found}", file=sys.stderr, flush=True)
    before, first = history.train_s, history.steps + 1
    progress = Progress(
        engine_name,
        checkpoints.folder / METRICS if ranks.is_first else None,
        updates,
        len(batches),
        config.logging_steps,
        history.step_losses,
        before + time.perf_counter() - started,
        reporter,
    )
    signals.status = progress.status
    with progress, signals.deferred():
        asked = time.perf_counter()
        left = range(first, first if best.stopped else updates + 1)
        for step, rows in zip(left, _endless(batches), strict=False):
            learning_rate = float(optimizer.param_groups[0]["lr"])
            window = [collate(list(share)) for share in ranks.shares(rows, micro)]
            waited = time.perf_counter() - asked
            with telling_shortages(device, f"at update {step} with engine {engine_name}", _SMALLER):
                loss, grad_norm, skipped = _update(trainer, window, task)
            tokens = sum(task.tokens(one, job.model_config) for one in window) * ranks.mesh.batches
            history.tokens += tokens
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
            progress.update(step, loss, grad_norm, learning_rate, tokens, waited)
            ends_epoch, is_last, is_best = not batches.samples, step == updates, False
            # the last evaluation is that of the result
            if (best.is_asked or not is_last) and _is_evaluated(config, step, ends_epoch):
                began = time.perf_counter()
                with progress.paused():
                    held, scores = evaluate(trainer, job, ranks)
                if not math.isfinite(held):
                    raise TrainingError(
                        f"the evaluation loss is {held}, after update {step} with engine "
                        f"{engine_name}; fix: lower --learning_rate or raise --warmup_steps"
                    )
                progress.evaluated(step, held, scores)
                is_best = best.judge(step, held, scores, folder_name(trainer.updates, 0))
                is_last = is_last or best.stopped
                started += time.perf_counter() - began  # of no update
            # read once: what comes later is for the next update
            stopping = ranks.largest(signals.stopping or 0) or None
            if is_best or checkpoints.is_due(step, ends_epoch, is_last, stopping is not None):
                with progress.paused(), as_loaded():
                    checkpoints.save(trainer, step, best.checkpoint if best.is_kept else "")
            if best.stopped:
                break
            if stopping is not None:
                raise Stopped(stopping)
            asked = time.perf_counter()
    best.tell(engine_name, history.steps)
    if best.is_kept and best.step is not None:
        kept = ranks.from_first(lambda: checkpoints.find(best.checkpoint))
        if kept is None:
            print(f"note: {best.checkpoint} is gone; the last weights stay", file=sys.stderr)
        else:
            trainer.load_weights(kept)
    signals.status = lambda: f"{engine_name}: {updates} updates are done; evaluates and saves"
    return trainer


def _is_evaluated(config: FinetuneConfig, step: int, ends_epoch: bool) -> bool:
    """Whether the model is evaluated after update number `step` (from 1)."""
    if config.eval_strategy == "epoch":
        return ends_epoch
    every = config.eval_steps or config.logging_steps
    return config.eval_strategy == "steps" and step % every == 0


def _endless(batches: ResumableDataLoader) -> Iterator[list[Row]]:
    """The batches that are left of the epoch, and those of the epochs after it."""
    while True:
        yield from batches


def _update(
    trainer: LoopTrainer, window: Sequence[Batch], task: Task
) -> tuple[float, float | None, bool]:
    """Makes one optimizer update from micro-batches.

    Returns the mean loss over all their labels, the gradient's global 2-norm before clipping (None
    where it is not computed or not finite), and whether the update was skipped because a gradient
    was infinite or NaN.
    """
    counts = [task.counted(batch) for batch in window]
    total, norm, skipped, loss = 0.0, None, False, None
    for batch, count in zip(window, counts, strict=True):
        share = count / max(sum(counts), 1)
        if isinstance(trainer, Trainer):
            step = trainer.train_step(batch)
        else:
            step = trainer.train_step(batch, share)
        total += share * float(step.loss)
        norm, skipped, loss = step.grad_norm, step.skipped, step.window_loss
    found = None if norm is None or not math.isfinite(float(norm)) else float(norm)
    return (total if loss is None else float(loss)), found, skipped


def evaluate(
    trainer: LoopTrainer, job: Job, ranks: RunRanks | None = None
) -> tuple[float, dict[str, float]]:
    """The mean loss over all labels of the samples to evaluate on, and the task's scores.

    The last batch of blocks is padded with ignored rows, so that one shape serves all batches, and
    all batches have at least as many rows as a pipeline needs. Each rank takes other batches,
    except for those that share weights, and the result is that of one process: to the bit where
    every rank has all weights.
    """
    ranks = RunRanks() if ranks is None else ranks
    config, task = job.config, job.task
    size, samples = config.per_device_eval_batch_size, job.eval
    collate = job.collate()
    taken = SeededDataset(job.drawn(samples), config.seed, list)
    starts = range(0, len(samples), size)
    rows_of_all = max(min(size, len(samples)), least_rows(config))
    losses: dict[int, float] = {}
    counts: dict[int, float] = {}
    told: dict[int, list[Any]] = {}
    for place, counts_here in ranks.evaluates(len(starts)):
        numbers = range(starts[place], min(starts[place] + size, len(samples)))
        rows = taken.__getitems__([Place(0, number, number) for number in numbers])
        batch = collate(rows)
        if task.unit == "blocks":
            batch = _with_ignored_rows(batch, rows_of_all)
        with telling_shortages(trainer.device, "in an evaluation", _SMALLER_EVALUATION):
            step = trainer.eval_step(batch, fetch=task.fetch)
        if counts_here:
            counts[place] = task.counted(batch)
            losses[place] = counts[place] * float(step.loss) if counts[place] else 0.0
            told[place] = task.predictions(rows, batch, moved(step.outputs, torch.device("cpu")))
    total = count = 0.0
    for part, number in zip(
        ranks.joined(losses, len(starts)), ranks.joined(counts, len(starts)), strict=True
    ):
        total += part
        count += number
    loss = total / count
    predictions = [one for part in ranks.gathered(told, len(starts)) for one in part]
    return loss, task.scores(predictions, loss, job.model_config)


def _with_ignored_rows(batch: Batch, size: int) -> Batch:
    """The batch with at least so many rows, of which the new ones have no label."""
    real = len(batch["labels"])
    if real >= size:
        return batch
    rows = {n: torch.cat([t, t[:1].expand(size - real, -1)]) for n, t in batch.items()}
    rows["labels"][real:] = IGNORED_LABEL  # of a copy
    return rows


def eval_results(job: Job, result: EngineResult) -> dict[str, float | int | str]:
    """The content of eval_results.json, with the names of Hugging Face's examples."""
    return {
        "engine": result.engine,
        "eval_loss": result.eval_loss,
        **result.scores,
        "eval_samples": len(job.eval),
        "eval_runtime": result.eval_s,
        "train_loss": result.train_loss,
        "train_runtime": result.train_s,
        "train_samples": len(job.train),
        "first_step_s": result.first_step_s,
        "tokens_per_second": result.tokens_per_second,
        "peak_rss_mib": result.peak_rss_mib,
        "base_rss_mib": result.base_rss_mib,
        **({} if result.peak_device_mib is None else {"peak_device_mib": result.peak_device_mib}),
        "start_weights_sha256": result.start_weights_sha256,
    }


_OF_TRAINING = {"tokens_per_second": "train_tokens_per_second"}


def reported_results(job: Job, result: EngineResult) -> dict[str, float | int]:
    """The numbers of `eval_results`, by names that no metrics line has at services."""
    named = _OF_TRAINING | {name: f"eval_{name}" for name in result.scores}
    return {
        named.get(name, name): value
        for name, value in eval_results(job, result).items()
        if not isinstance(value, str)
    }


def _tokens_per_second(history: RunHistory) -> float:
    """Tokens per second of all shares, over all updates but the first of each process."""
    firsts = history.first_steps_s
    if history.steps == len(firsts):
        return history.tokens / sum(firsts)
    tokens = history.tokens * (history.steps - len(firsts)) / history.steps
    return tokens / (history.train_s - sum(firsts))
