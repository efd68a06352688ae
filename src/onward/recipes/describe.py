"""From options to a described run: sources are read, samples made, everything checked."""

from __future__ import annotations

import dataclasses
import math
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from onward.recipes.corpus import Text
from onward.recipes.lora import require_peft
from onward.recipes.model_size import check_block_size, check_positions, parameter_count
from onward.recipes.options import FinetuneConfig, InputError, check_options
from onward.recipes.presets import PRESETS
from onward.recipes.processors import loaded_processor, made_processor
from onward.recipes.samples import Samples
from onward.recipes.sound_processor import tokenizer_of
from onward.recipes.start_model import (
    check_model_name,
    check_task,
    check_vocabulary,
    from_scratch,
    load_model_config,
    overridden,
    require_hf,
    scratch_config,
    set_dropout,
    weight_files,
)
from onward.recipes.tables import Table
from onward.recipes.tasks import Baseline, Task, task_of
from onward.recipes.trainer_switches import shares_of, sizes_of

if TYPE_CHECKING:
    from onward.recipes.loop import Job

BUILT_IN_STEPS = 150
FILE_EPOCHS = 3.0
LOADED_LEARNING_RATE = 5e-5


@dataclass(frozen=True)
class Run:
    """A described run: everything is decided, nothing is written yet.

    job: resolved options, model configuration, samples, tokenizer.
    sources: the texts or tables that were read. train_tokens, eval_tokens: numbers of tokens before
        they are cut into samples; eval_tokens is 0 if the samples were held out of the train text.
    parameters: number of weights. baseline: the score without a model. facts: what the task found
        in the data, in words.
    """

    job: Job
    sources: tuple[Text | Table, ...]
    train_tokens: int
    eval_tokens: int
    parameters: int
    baseline: Baseline
    facts: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> Any:
        """The job's tokenizer; for tasks with images the image processor, which takes its place."""
        return self.job.tokenizer


def describe(config: FinetuneConfig) -> Run:
    """Reads and checks everything, and writes nothing. Raises InputError or MissingExtraError."""
    check_options(config)
    check_model_name(config)
    task = task_of(config)
    scratch = from_scratch(config)
    _check_scratch(config, task, scratch)
    if config.lora_r is not None:
        require_peft()
    sources = task.read(config)
    require_hf()
    if config.teacher_model is not None:
        from onward.recipes.teacher import taught

        sources = taught(sources, config)
    # the run prints what matters; transformers' notes would break the progress bar
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    from onward.recipes.loop import Job

    model_config = None
    if not scratch:
        model_config = load_model_config(config)
        if task.unit == "blocks":
            check_block_size(model_config, config.block_size)
    processor = loaded_processor(config, task)
    if processor is None:
        processor = made_processor(config, task, sources)
    if model_config is None:
        model_config = scratch_config(config, tokenizer_of(processor))
    if config.dropout is not None:
        set_dropout(model_config, config.dropout)
    data = task.encode(sources, processor, model_config, config)
    task.collate(processor, config)  # says what the tokenizer lacks
    ids = [*data.train.token_ids(), *data.eval.token_ids()]
    check_vocabulary(model_config, ids, tokenizer_of(processor))
    config = _resolve(config, data.train, task, scratch)
    random = dataclasses.replace(config, model_name_or_path=task.preset)  # its weights do not count
    return Run(
        job=Job(config, model_config, data.train, data.eval, processor),
        sources=sources,
        train_tokens=data.train_tokens,
        eval_tokens=data.eval_tokens,
        parameters=parameter_count(
            config.model_name_or_path,
            model_config,
            weight_files(config),
            task.model_class(),
            lambda model: task.assembled(model, random, lambda _: deepcopy(model)),
            config.config_overrides,
        ),
        baseline=data.baseline,
        facts=data.facts,
    )


def _check_scratch(config: FinetuneConfig, task: Task, scratch: bool) -> None:
    """Raises InputError for options of models from scratch beside a model that is loaded, and for
    what its preset cannot be."""
    if scratch:
        preset = PRESETS[config.model_name_or_path]
        if task.unit == "blocks" and config.config_overrides is None:
            check_positions(preset.positions, config.block_size)
        usual = config.task == "causal-lm" and preset.family in ("gpt2", "llama")
        if not usual or config.config_overrides is not None:
            require_hf()
            check_task(config, overridden(config, preset.vocab_size))
        return
    for name in ("vocab_size", "config_overrides"):
        if getattr(config, name) is not None:
            is_are = "are" if name.endswith("s") else "is"
            raise InputError(
                f"{name} {is_are} for a model from scratch",
                f"in --{name} with model {config.model_name_or_path!r}",
                "leave it out",
            )


def _resolve(config: FinetuneConfig, train: Samples, task: Task, scratch: bool) -> FinetuneConfig:
    """Fills in options that depend on the data and the model. Raises InputError where the data are
    too few."""
    if shares_of(config.mesh) > 1 and not task.shares_data:
        raise InputError(
            f"task {task.name} compares the samples of a batch, which processes cannot share",
            "in --mesh",
            "leave it out, and start one process",
        )
    for axis, size in (sizes_of(config.mesh) or {}).items():
        if axis in ("tp", "cp", "pp") and size > 1 and axis not in task.sides:
            raise InputError(
                f"task {task.name} has no batches that {axis} can cut",
                "in --mesh",
                "give other axes, such as dp_replicate",
            )
    per_update = config.per_device_train_batch_size * config.gradient_accumulation_steps
    per_update *= shares_of(config.mesh)
    if len(train) < per_update:
        of_size = f" of {config.block_size} tokens" if task.unit == "blocks" else ""
        options = "--per_device_train_batch_size"
        raise InputError(
            f"{len(train)} train {task.unit}{of_size} do not fill one update of {per_update}",
            "in the train text" if task.unit == "blocks" else "in the train file",
            f"give more text, or lower {options}" + (" or --block_size" if of_size else ""),
        )
    steps = config.max_steps
    if steps is None and config.num_train_epochs is None and config.train_file is None:
        steps = BUILT_IN_STEPS
    if steps is None:
        steps = math.ceil((config.num_train_epochs or FILE_EPOCHS) * (len(train) // per_update))
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


__all__ = ["Run", "describe"]
