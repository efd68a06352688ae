"""The options of `onward finetune`: typed, with Hugging Face's names, checked before a model
loads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onward.errors import MissingExtraError, OnwardError, one_line
from onward.memory_amounts import MEMORY_BUDGET, memory_amount
from onward.options import switch_lines
from onward.recipes.presets import default_model
from onward.recipes.task_switches import SWITCH_TASKS, TEXT_TASKS


class InputError(OnwardError):
    """Raised for user input that cannot run: `what, where; fix: how`, always one line."""

    def __init__(self, what: str, where: str, fix: str) -> None:
        text = f"{one_line(what, 330)}, {where}; fix: {fix}"
        super().__init__(" ".join(text.split()))


def option(default: Any, help: str, several: bool = False) -> Any:
    """A dataclass field with its line in `--help`. several: whether it takes several words, which
    become one text with commas."""
    return dataclasses.field(default=default, metadata={"help": help, "several": several})


REPEATED = "\0"  # between the values of an option that is given several times


def repeated_option(help: str) -> Any:
    """A dataclass field of an option that may be given several times: one text, with `REPEATED`
    between the values."""
    metadata = {"help": help, "several": False, "repeated": True}
    return dataclasses.field(default="", metadata=metadata)


def of_trainer(name: str, default: Any) -> Any:
    """A switch that sets an option of onward.Trainer; its line in `--help` is kept with that
    option."""
    return option(default, switch_lines()[name])


@dataclass(frozen=True)
class FinetuneConfig:
    """One training run; every field is an option of `onward finetune`."""

    task: Literal[
        "causal-lm",
        "masked-lm",
        "text-classification",
        "token-classification",
        "question-answering",
        "multiple-choice",
        "seq2seq-lm",
        "text-denoising",
        "text-retrieval",
        "image-classification",
        "automatic-speech-recognition",
        "bert-pretraining",
    ] = option("causal-lm", "what the model learns")
    model_name_or_path: str = option(
        None,
        "a model from random weights (gpt2-tiny, gpt2-small, gpt2-medium, llama-tiny, bert-tiny, "
        "roberta-tiny, t5-tiny, vit-tiny, whisper-tiny ...), a local model folder, or a hub name "
        "such as openai-community/gpt2-medium; null: gpt2-tiny for causal-lm, t5-tiny for "
        "seq2seq-lm and text-denoising, vit-tiny for images, whisper-tiny for speech, else "
        "bert-tiny; alias --model",
    )
    tokenizer_name: str | None = option(
        None, "folder or hub name of the tokenizer; null: the model's, else one is trained"
    )
    vocab_size: int | None = option(
        None, "tokens of a tokenizer trained for a model from scratch; null: the model's usual size"
    )
    train_file: str | None = option(
        None,
        "UTF-8 text to train on, or a table of texts or examples (.csv, .tsv, .jsonl, .parquet, a "
        "saved dataset's folder, of images also a folder with one of each label); "
        "null: the sources of Python's own library, for images scikit-learn's digits",
    )
    validation_file: str | None = option(
        None, "text or table to evaluate on; null: one in twenty of the others; alias --eval_file"
    )
    text_column: str | None = option(
        None,
        "column of the text, image or sound; two for pairs; null: the task's usual name",
        several=True,
    )
    label_column: str | None = option(
        None, "column of the label or the target text; null: label, or the task's usual name"
    )
    config_overrides: str | None = option(
        None,
        "values of the configuration of a model from scratch, such as n_layer=4,n_embd=128",
    )
    corpus_bytes: int = option(3_000_000, "built-in corpus: read at most this many bytes")
    block_size: int = option(128, "tokens per sequence that is cut from a text")
    packing: bool = option(
        True,
        "documents follow each other in sequences of one length; false: each is cut by itself, and "
        "batches are padded",
    )
    max_seq_length: int | None = option(
        None, "tokens of an example, at most; null: 128 (256 of a source text, 384 with a passage)"
    )
    max_target_length: int | None = option(
        None, "tokens of a target text, at most; null: 128, of speech as many as the decoder has"
    )
    source_lang: str | None = option(None, "code of the sources' language, such as en_XX")
    target_lang: str | None = option(None, "code of the targets' language, such as de_DE")
    predict_with_generate: bool = option(
        False, "write texts for the samples that are evaluated, at the end, and score them"
    )
    generation_num_beams: int = option(1, "beams of the search for a text; 1: greedy")
    source_prefix: str | None = option(None, "text before each source, such as 'summarize: '")
    towers: Literal["shared", "separate"] | None = option(
        None, "whether queries and documents have one encoder or two; null: the model's, or shared"
    )
    pooling: Literal["mean", "cls", "lasttoken", "weighted"] | None = option(
        None, "how an encoder's states become a vector; null: the model's, or mean"
    )
    crossing: Literal["cosine", "residual"] | None = option(
        None, "how two vectors become a score; null: the model's, or cosine"
    )
    teacher_model: str | None = option(
        None, "a text-classification model of pairs, whose scores are learnt in place of labels"
    )
    doc_stride: int = option(128, "tokens that the pieces of a long passage share")
    mlm_probability: float = option(0.15, "share of tokens that are hidden")
    mean_span_length: float = option(3.0, "tokens of a hidden span, on average")
    max_train_samples: int | None = option(
        None, "train on at most this many samples, the first ones; null: all"
    )
    max_eval_samples: int | None = option(None, "evaluate at most this many samples; null: all")
    engine: Literal["onward", "torch"] = option("onward", "what computes the training step")
    compare: bool = option(
        False, "train with both engines, same start weights and batches, and print one table"
    )
    per_device_train_batch_size: int = option(
        8,
        "sequences per micro-batch of each process; processes along tp, cp and pp share them",
    )
    per_device_eval_batch_size: int = option(8, "sequences per evaluation batch")
    dataloader_num_workers: int = option(0, "processes that prepare samples; 0: the run's own")
    eval_strategy: Literal["no", "steps", "epoch"] = option(
        "no", "when the model is evaluated, in addition to the end"
    )
    eval_steps: int | None = option(
        None, "updates between evaluations with --eval_strategy steps; null: logging_steps"
    )
    load_best_model_at_end: bool = option(
        False, "end with the weights of the best evaluation, whose checkpoint is kept"
    )
    metric_for_best_model: str | None = option(
        None, "score of an evaluation that is compared, such as accuracy; null: loss"
    )
    greater_is_better: bool | None = option(
        None, "whether a larger score is better; null: yes, but for losses, perplexity and mse"
    )
    early_stopping_patience: int | None = option(
        None, "evaluations in a row without a better score, after which a run ends; null: none do"
    )
    gradient_accumulation_steps: int = of_trainer("gradient_accumulation_steps", 1)
    num_train_epochs: float | None = option(
        None, "passes over the training blocks; null: 3 for your files, see max_steps"
    )
    max_steps: int | None = option(
        None, "optimizer updates, overrides num_train_epochs; null: 150 for the built-in corpus"
    )
    learning_rate: float | None = option(
        None, "peak learning rate; null: 5e-5 for loaded weights, the preset's from scratch"
    )
    optim: Literal[
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_hf",
        "sgd",
        "adagrad",
        "rmsprop",
        "adafactor",
        "lion",
        "lamb",
        "muon",
    ] = option("adamw_torch", "the optimizer; adamw_torch, adamw_torch_fused and adamw_hf are one")
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
    ] = option("linear", "shape of the learning rate over the updates")
    warmup_steps: int = option(0, "updates over which the learning rate rises from 0")
    warmup_ratio: float | None = option(
        None, "share of all updates over which the learning rate rises; null: see warmup_steps"
    )
    adam_beta1: float = option(0.9, "AdamW's decay of the first moment, the mean of gradients")
    adam_beta2: float = option(
        0.999, "AdamW's decay of the second moment, the mean of squared gradients"
    )
    adam_epsilon: float = option(1e-8, "AdamW's epsilon, added to the root of the second moment")
    weight_decay: float = option(0.01, "AdamW decay of matrices; biases and norms have none")
    max_grad_norm: float | None = of_trainer("max_grad_norm", 1.0)
    skip_nonfinite: bool = of_trainer("skip_nonfinite", True)
    memory_budget: int | float | str | None = of_trainer("memory_budget", None)
    gradient_checkpointing: bool = option(
        False, "compute the activations of every layer again in the backward"
    )
    lora_r: int | None = option(
        None, "rank of LoRA's adapters, which alone are trained; null: all weights are"
    )
    lora_alpha: int | None = option(None, "LoRA's scale times the rank; null: twice the rank")
    lora_dropout: float = option(0.0, "dropout before LoRA's adapters")
    lora_target_modules: str | None = option(
        None,
        "layers that get adapters, or all-linear; null: peft's choice for the family",
        several=True,
    )
    mesh: str | None = of_trainer("mesh", None)
    zero: int = of_trainer("zero", 0)
    pipeline_schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"] = (
        of_trainer("pipeline_schedule", "1F1B")
    )
    pipeline_microbatches: int | None = of_trainer("pipeline_microbatches", None)
    sequence_parallel: bool = of_trainer("sequence_parallel", False)
    context_parallel_method: Literal["auto", "allgather", "alltoall", "ring"] = of_trainer(
        "context_parallel_method", "auto"
    )
    optimizer_state: Literal["fp32", "bf16", "8bit"] = of_trainer("optimizer_state", "fp32")
    offload_optimizer: Literal["cpu", "disk"] | None = of_trainer("offload_optimizer", None)
    offload_dir: str | None = of_trainer("offload_dir", None)
    bf16: bool = of_trainer("bf16", False)
    fp16: bool = of_trainer("fp16", False)
    tf32: bool = option(False, "products of fp32 in TF32, on GPUs of NVIDIA's Ampere and later")
    use_cpu: bool = option(False, "train on the CPU, although a GPU is here")
    export_dtype: Literal["float32", "float16", "bfloat16"] = option(
        "float32", "element type of products and their weights in the model.onnx that is written"
    )
    dropout: float | None = option(
        None, "every dropout probability of the model, 0 to below 1; null: the model's own"
    )
    seed: int = of_trainer("seed", 42)
    logging_steps: int = option(10, "updates per progress line and per line of metrics.jsonl")
    report_to: str = option(
        "none",
        "services that get the metrics too: tensorboard, mlflow, wandb, several of them, all for "
        "those that are installed, or none",
        several=True,
    )
    run_name: str | None = option(
        None, "name of the run at those services; null: that of output_dir's folder"
    )
    logging_dir: str | None = option(
        None, "folder for TensorBoard's files; null: tensorboard in output_dir"
    )
    output_dir: str | None = option(
        None,
        "folder for model, tokenizer, results and checkpoints; a run that was stopped goes on "
        "there; null: runs/finetune-<date>-<time>",
    )
    overwrite_output_dir: bool = option(
        False, "start afresh: remove what a run has written into output_dir, its checkpoints too"
    )
    save_strategy: Literal["steps", "epoch", "no"] | None = option(
        None, "when checkpoints are written; null: steps, or no with --compare"
    )
    save_steps: int | None = option(None, "updates between checkpoints; null: 500")
    save_total_limit: int | None = option(None, "newest checkpoints that are kept; null: all")
    resume_from_checkpoint: str | None = option(
        None, "checkpoint to go on from; null: the newest in output_dir that is whole, if any"
    )
    allow_pickle: bool = option(
        False, "load weights from .bin files too, which are pickles, with weights_only"
    )
    ignore_mismatched_sizes: bool = option(
        False,
        "start a head at random where its weights do not have the shapes that the labels need",
    )
    dry_run: bool = option(
        False, "print options, counts of tokens and steps, and the memory of a step; train nothing"
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path is None:
            object.__setattr__(self, "model_name_or_path", default_model(self.task))


@dataclass(frozen=True)
class PretrainConfig(FinetuneConfig):
    """Options of `onward pretrain`: those of finetune, of which the phase decides some."""

    task: Literal["bert-pretraining"] = option("bert-pretraining", "what the model learns")
    model_name_or_path: str = option(
        "bert-large", "a model from random weights, or the folder of phase 1; alias --model"
    )
    phase: Literal[1, 2] = option(
        1, "of BERT's recipe: 1 has blocks of 128 tokens, 2 of 512, and its own rate and updates"
    )
    global_batch_size: int | None = option(
        None, "sequences of an update, of all processes; null: 65536 in phase 1, 32768 in phase 2"
    )
    block_size: int = option(None, "tokens per pair of texts; null: 128 in phase 1, 512 in phase 2")
    gradient_accumulation_steps: int = option(
        None, "micro-batches per update; null: as many as global_batch_size needs"
    )
    optim: Literal[
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_hf",
        "sgd",
        "adagrad",
        "rmsprop",
        "adafactor",
        "lion",
        "lamb",
        "muon",
    ] = option("lamb", "the optimizer; adamw_torch, adamw_torch_fused and adamw_hf are one")
    learning_rate: float | None = option(None, "null: 6e-3 in phase 1, 4e-3 in phase 2")
    warmup_ratio: float | None = option(None, "null: 0.2843 in phase 1, 0.128 in phase 2")
    max_steps: int | None = option(None, "updates; null: 7038 in phase 1, 1563 in phase 2")
    adam_epsilon: float = option(1e-6, "LAMB's epsilon")
    dataloader_num_workers: int = option(2, "processes that prepare samples; 0: the run's own")


@dataclass(frozen=True)
class VerifyConfig(FinetuneConfig):
    """Options of `onward verify`: those of finetune, of which only model and data matter."""

    bisect: bool = option(False, "on a difference, find the first value in the graph that is wrong")


@dataclass(frozen=True)
class DataConfig(FinetuneConfig):
    """Options of `onward data`: those of finetune, of which only model and data matter."""

    samples: int = option(2, "blocks that are shown, drawn by --seed")
    json: bool = option(False, "print the counts as JSON in place of text")


RECORD = "run_config.json"  # of an output folder: what its run is
_STATE = ("optimizer_state", "offload_optimizer", "offload_dir")
_BEST = (
    "load_best_model_at_end", "early_stopping_patience", "metric_for_best_model",
    "greater_is_better",
)  # fmt: skip
_SAVING = ("save_strategy", "save_steps", "save_total_limit", "resume_from_checkpoint")

# (option, condition on its value, the condition in words)
CONDITIONS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("vocab_size", lambda v: v >= 257, "of at least 257 (256 bytes and the end-of-text token)"),
    ("corpus_bytes", lambda v: v > 0, "above 0"),
    ("block_size", lambda v: v >= 2, "of at least 2 tokens"),
    ("max_seq_length", lambda v: v >= 4, "of at least 4 tokens"),
    ("max_target_length", lambda v: v >= 2, "of at least 2 tokens"),
    ("generation_num_beams", lambda v: v > 0, "above 0"),
    ("doc_stride", lambda v: v >= 0, "of 0 or more"),
    ("mlm_probability", lambda v: 0 < v < 1, "between 0 and 1"),
    ("mean_span_length", lambda v: 1 <= v < math.inf, "of at least 1"),
    ("max_train_samples", lambda v: v > 0, "above 0"),
    ("max_eval_samples", lambda v: v > 0, "above 0"),
    ("per_device_train_batch_size", lambda v: v > 0, "above 0"),
    ("per_device_eval_batch_size", lambda v: v > 0, "above 0"),
    ("dataloader_num_workers", lambda v: v >= 0, "of 0 or more"),
    ("eval_steps", lambda v: v > 0, "above 0"),
    ("early_stopping_patience", lambda v: v > 0, "above 0"),
    ("gradient_accumulation_steps", lambda v: v > 0, "above 0"),
    ("num_train_epochs", lambda v: 0 < v < math.inf, "above 0"),
    ("max_steps", lambda v: v > 0, "above 0"),
    ("learning_rate", lambda v: 0 <= v < math.inf, "of 0 or more"),
    ("warmup_steps", lambda v: v >= 0, "of 0 or more"),
    ("warmup_ratio", lambda v: 0 <= v <= 1, "from 0 to 1"),
    ("adam_beta1", lambda v: 0 <= v < 1, "from 0 to below 1"),
    ("adam_beta2", lambda v: 0 <= v < 1, "from 0 to below 1"),
    ("adam_epsilon", lambda v: 0 < v < math.inf, "above 0"),
    ("weight_decay", lambda v: 0 <= v < math.inf, "of 0 or more"),
    ("max_grad_norm", lambda v: 0 <= v < math.inf, "of 0 or more"),
    ("memory_budget", lambda v: memory_amount(v) is not None, MEMORY_BUDGET),
    ("lora_r", lambda v: v > 0, "above 0"),
    ("lora_alpha", lambda v: v > 0, "above 0"),
    ("lora_dropout", lambda v: 0 <= v < 1, "from 0 to below 1"),
    ("dropout", lambda v: 0 <= v < 1, "from 0 to below 1"),
    ("seed", lambda v: 0 <= v < 2**32, "from 0 to 4294967295"),
    ("logging_steps", lambda v: v > 0, "above 0"),
    ("save_steps", lambda v: v > 0, "above 0"),
    ("save_total_limit", lambda v: v > 0, "above 0"),
    ("samples", lambda v: v >= 0, "of 0 or more"),
)


def check_options(config: FinetuneConfig) -> None:
    """Raises InputError for the first invalid value. Of files it only reads `stat`."""
    for name, holds, words in CONDITIONS:
        value = getattr(config, name, None)  # of another command's options
        if value is not None and not holds(value):
            raise InputError(f"{name} is {value!r}", f"in --{name}", f"give a value {words}")
    _check_together(config)
    for name in ("train_file", "validation_file"):
        check_text_file(getattr(config, name), name, config.task not in TEXT_TASKS)
    if config.validation_file and not config.train_file:
        raise InputError(
            "a validation file without a train file", "in --validation_file", "add --train_file"
        )
    _check_best(config)
    _check_engine(config)
    _check_saving(config)
    _check_reports(config)
    if config.output_dir is not None and not config.dry_run:
        check_output_dir(Path(config.output_dir))


def _check_together(config: FinetuneConfig) -> None:
    """Raises InputError for switches of which one alone can be given, and for those of another
    task."""
    usual = FinetuneConfig(task=config.task)
    for name, tasks in SWITCH_TASKS.items():
        if config.task not in tasks and getattr(config, name) != getattr(usual, name):
            raise InputError(
                f"task {config.task} has no {name}",
                f"in --{name}",
                "leave it out"
                + (f", or give --task {' or '.join(tasks)}" if len(tasks) < 7 else ""),
            )
    for name in ("lora_alpha", "lora_dropout", "lora_target_modules"):
        if getattr(config, name) not in (None, 0.0) and config.lora_r is None:
            raise InputError(f"{name} without lora_r", f"in --{name}", "add --lora_r 8")
    if config.lora_r is not None and config.task == "text-retrieval":
        raise InputError("task text-retrieval has no adapters", "in --lora_r", "leave it out")
    if config.bf16 and config.fp16:
        raise InputError("bf16 and fp16 together", "on the command line", "give one of them")
    if config.fp16 and not config.skip_nonfinite:
        raise InputError(
            "fp16 finds its loss scale by skipping updates",
            "in --skip_nonfinite false",
            "leave it out, or give --bf16",
        )
    if config.warmup_ratio and config.warmup_steps:
        raise InputError(
            "warmup_ratio and warmup_steps together", "on the command line", "give one of them"
        )
    if config.eval_steps is not None and config.eval_strategy != "steps":
        raise InputError(
            f"eval_steps is for --eval_strategy steps, not {config.eval_strategy}",
            "in --eval_steps",
            "add --eval_strategy steps, or leave it out",
        )
    if config.gradient_checkpointing and config.memory_budget is not None:
        raise InputError(
            "gradient_checkpointing and memory_budget both say what is computed again",
            "on the command line",
            "give one of them",
        )


def _check_best(config: FinetuneConfig) -> None:
    """Raises InputError for a best evaluation that is not looked for."""
    asked = [name for name in _BEST[:2] if getattr(config, name)]
    given = [name for name in _BEST[2:] if getattr(config, name) is not None]
    if given and not asked:
        raise InputError(
            f"{given[0]} without a best evaluation",
            f"in --{given[0]}",
            f"add --{_BEST[0]} or --{_BEST[1]} 3",
        )
    if asked and config.eval_strategy == "no":
        raise InputError(
            f"{asked[0]} needs evaluations", f"in --{asked[0]}", "add --eval_strategy epoch"
        )
    if asked and config.compare:
        raise InputError(
            "--compare trains both engines for as many updates, and writes no checkpoints",
            f"in --compare with --{asked[0]}",
            "leave one of them out",
        )
    if config.load_best_model_at_end and config.save_strategy == "no":
        raise InputError(
            "the best weights are kept in a checkpoint",
            "in --load_best_model_at_end with --save_strategy no",
            "leave one of them out",
        )


def _check_engine(config: FinetuneConfig) -> None:
    """Raises InputError for optimizer state that eager PyTorch does not have."""
    given = [name for name in _STATE if getattr(config, name) not in (None, "fp32")]
    if config.engine == "torch" and given:
        raise InputError(
            f"eager PyTorch keeps no {given[0]} {getattr(config, given[0])}",
            f"in --{given[0]}",
            "leave it out, or give --engine onward",
        )


def _check_saving(config: FinetuneConfig) -> None:
    """Raises InputError for a comparison with checkpoints, and where a named one is missing."""
    given = [name for name in _SAVING if getattr(config, name) not in (None, "no")]
    if config.compare and given:
        raise InputError(
            "a comparison is one measurement, and has no checkpoints",
            f"in --compare with --{given[0]}",
            "leave one of them out",
        )
    named = config.resume_from_checkpoint
    if named is None or named.lower() == "true":
        return
    if named.lower() == "false":
        raise InputError(
            f"resume_from_checkpoint is {named!r}",
            "in --resume_from_checkpoint",
            "leave it out, or start afresh with --overwrite_output_dir",
        )
    if not Path(named).is_dir():
        raise InputError(
            f"no such checkpoint {named!r}", "in --resume_from_checkpoint", "name a folder"
        )


def _check_reports(config: FinetuneConfig) -> None:
    """Raises InputError or MissingExtraError for services that cannot be reported to."""
    from onward.reporting import reported_to

    try:
        names = reported_to(config.report_to)
    except MissingExtraError:
        raise
    except OnwardError as error:
        what, _, fix = str(error).partition("; fix: ")
        raise InputError(what, "in --report_to", fix) from error
    if config.compare and names:
        raise InputError(
            "a comparison is one measurement, and is not reported",
            "in --compare with --report_to",
            "leave one of them out",
        )


def check_text_file(path: str | None, name: str, may_be_folder: bool = False) -> None:
    """Raises InputError unless a text file exists, is a file and is not empty, or a folder of a
    saved dataset. may_be_folder: another folder is the task's to judge."""
    if path is None:
        return
    if not Path(path).exists():
        raise InputError(f"no such file {path!r}", f"in --{name}", "name an existing text file")
    if (Path(path) / "dataset_info.json").is_file() or (may_be_folder and Path(path).is_dir()):
        return
    if not Path(path).is_file():
        raise InputError(f"{path!r} is not a file", f"in --{name}", "name one text file")
    if Path(path).stat().st_size == 0:
        raise InputError(f"{path!r} is empty", f"in --{name}", "name a file with text")


def check_output_dir(path: Path) -> None:
    """Raises InputError unless the output folder is absent, empty or of a run, and its parents are
    folders."""
    if path.is_dir():
        if not is_run(path):
            check_unused(path)
        return
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise InputError(
                f"{str(part)!r} is a file, not a folder", "in --output_dir", "name a new folder"
            )


def is_run(folder: Path) -> bool:
    """Whether a folder is the output of a run, finished or not."""
    return (folder / RECORD).is_file()


def check_unused(path: Path) -> None:
    """Raises InputError for a folder with files that no run has written. What a run leaves that is
    killed while it writes the first one counts as nothing."""
    entries = list(path.iterdir())
    if not entries:
        return
    from onward.checkpoint import is_unpublished

    if not all(map(is_unpublished, entries)):
        raise InputError(
            f"output folder {str(path)!r} is not empty, and holds no run of onward finetune",
            "in --output_dir",
            "name a new folder, or empty this one",
        )
