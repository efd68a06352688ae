"""One engine's run over prepared blocks: updates, evaluation, and saving."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, get_scheduler

from onward.errors import OnwardError
from onward.recipes.causal_lm import build_model
from onward.recipes.corpus import Ids
from onward.recipes.engines import ENGINES, OnwardEngine, StepEngine, adamw
from onward.recipes.options import FinetuneConfig
from onward.recipes.progress import Progress, peak_rss_mib, reset_peak_rss, rss_mib
from onward.recipes.rundir import write_json
from onward.recipes.stages import StageLine

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

IGNORED_LABEL = -100


class TrainingError(OnwardError):
    """Raised if a valid run cannot continue."""


@dataclass(frozen=True)
class Job:
    """Everything that an engine needs for a run, so that two processes can train the same.

    config: with max_steps and learning_rate filled in. train_blocks, eval_blocks: `i32[blocks,
    block_size]`.
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
        return math.exp(min(self.eval_loss, 700.0))

    @property
    def train_loss(self) -> float:
        """Mean loss of the last ten updates, since one batch's loss says little."""
        last = self.step_losses[-10:]
        return sum(last) / len(last)

    @property
    def total_s(self) -> float:
        """Seconds of training and evaluation."""
        return self.train_s + self.eval_s


def block_order(
    count: int, per_update: int, updates: int, seed: int
) -> Iterator[NDArray[np.int64]]:
    """Indices `i64[per_update]` of each update's blocks, in a new permutation for each epoch.

    Blocks that do not fill a whole update are left out of that epoch.
    """
    done = epoch = 0
    while done < updates:
        order = np.random.default_rng((seed, epoch)).permutation(count)
        for start in range(0, count - per_update + 1, per_update):
            if done == updates:
                return
            yield order[start : start + per_update]
            done += 1
        epoch += 1


def train(job: Job, engine_name: str, folder: Path, *, save_model: bool = True) -> EngineResult:
    """Runs the job with one engine; writes metrics, results and the model into `folder`."""
    config = job.config
    base_rss = rss_mib()
    model = build_model(config, job.model_config)
    start_weights = weights_sha256(model)
    # the key/value cache serves generation; in training it only costs memory
    use_cache = getattr(model.config, "use_cache", None)
    model.config.use_cache = False
    losses, engine, first_step_s, train_s = _updates(job, engine_name, model, folder)
    peak_rss = peak_rss_mib()
    started = time.perf_counter()
    with StageLine(f"{engine_name}: evaluation"):
        eval_loss = evaluate(engine, job.eval_blocks, config.per_device_eval_batch_size)
    result = EngineResult(
        engine=engine_name,
        step_losses=tuple(losses),
        first_step_s=first_step_s,
        train_s=train_s,
        eval_s=time.perf_counter() - started,
        tokens_per_second=_tokens_per_second(config, len(losses), train_s, first_step_s),
        base_rss_mib=base_rss,
        peak_rss_mib=peak_rss,
        eval_loss=eval_loss,
        start_weights_sha256=start_weights,
    )
    write_json(folder / "eval_results.json", eval_results(job, result))
    model.config.use_cache = use_cache
    if save_model:
        model.save_pretrained(folder)
        if isinstance(engine, OnwardEngine):
            engine.export_onnx(folder / "model.onnx", config.export_dtype)
    return result


def _updates(
    job: Job, engine_name: str, model: PreTrainedModel, folder: Path
) -> tuple[list[float], StepEngine, float, float]:
    """Runs all updates. Returns the losses, the engine, and the seconds until the first and the
    last update were done. Raises TrainingError for a loss that is not finite."""
    config = job.config
    updates = config.max_steps or 1
    micro, accumulate = config.per_device_train_batch_size, config.gradient_accumulation_steps
    torch.manual_seed(config.seed)
    optimizer = adamw(model, config)
    losses: list[float] = []
    progress = Progress(
        engine_name,
        folder / "metrics.jsonl",
        updates,
        len(job.train_blocks) // (micro * accumulate),
        micro * accumulate * config.block_size,
        config.logging_steps,
    )
    reset_peak_rss()
    started = time.perf_counter()
    first_step_s = 0.0
    with progress:
        engine: StepEngine = ENGINES[engine_name](model, optimizer, config)
        scheduler = get_scheduler(
            config.lr_scheduler_type,
            optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=updates,
        )
        order = block_order(len(job.train_blocks), micro * accumulate, updates, config.seed)
        for step, indices in enumerate(order, 1):
            batch = torch.from_numpy(job.train_blocks[indices].astype(np.int64))
            learning_rate = float(optimizer.param_groups[0]["lr"])
            loss, grad_norm = engine.update(batch.split(micro))
            if not engine.skipped:
                scheduler.step()
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss is {loss}, at update {step} with engine {engine_name}; "
                    f"fix: lower --learning_rate (it was {learning_rate:.2e}) or raise "
                    "--warmup_steps"
                )
            losses.append(loss)
            if step == 1:
                first_step_s = time.perf_counter() - started
            progress.update(step, loss, grad_norm, learning_rate)
        train_s = time.perf_counter() - started
    return losses, engine, first_step_s, train_s


def evaluate(engine: StepEngine, eval_blocks: Ids, batch_size: int) -> float:
    """Mean loss over all predicted tokens of the blocks `i32[blocks,T]`, nats per token.

    The last batch is padded with ignored rows, so that one shape serves all batches.
    """
    total = 0.0
    for start in range(0, len(eval_blocks), batch_size):
        rows = torch.from_numpy(eval_blocks[start : start + batch_size].astype(np.int64))
        real = len(rows)
        if real < min(batch_size, len(eval_blocks)):
            filler = rows[:1].expand(min(batch_size, len(eval_blocks)) - real, -1)
            rows = torch.cat([rows, filler])
        labels = rows.clone()
        labels[real:] = IGNORED_LABEL
        total += real * engine.evaluate(rows, labels)
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


def weights_sha256(model: PreTrainedModel) -> str:
    """The SHA-256 of the names and bytes of all weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tokens_per_second(
    config: FinetuneConfig, updates: int, train_s: float, first_step_s: float
) -> float:
    tokens = (
        config.per_device_train_batch_size * config.gradient_accumulation_steps * config.block_size
    )
    if updates == 1:
        return tokens / first_step_s
    return tokens * (updates - 1) / (train_s - first_step_s)
