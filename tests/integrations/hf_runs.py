"""Runs of transformers' Trainer and of those that take its place, and how they are compared."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from texts import VOCABULARY, classified_rows, language_rows
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)

from onward.integrations.transformers import Trainer

KINDS: tuple[Any, ...] = (Trainer, transformers.Trainer)
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-6}
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "epoch", "step")


def causal_lm(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_layer=1, n_embd=16, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=0, **drops,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    plain: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "max_steps": 6, "learning_rate": 1e-3,
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "log_level": "error",
        "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(**{**plain, **changes})


def right(found: Any) -> dict[str, float]:
    """compute_metrics: the share of right predictions."""
    return {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def clear_lm() -> Any:
    """A model without the parameter whose gradients are partly nothing but rounding (the keys'
    bias), which optimizers that divide by a gradient's size would make large."""
    model: Any = causal_lm()
    for block in model.transformer.h:
        block.attn.c_attn.bias.requires_grad_(False)
    return model


def language(kind: Any, model: Any, args: TrainingArguments, **named: Any) -> Any:
    """A trainer of a causal language model; batches differ in their number of labels."""
    rows = language_rows(36, unlabelled=6)
    return kind(
        model, args, train_dataset=rows[:28], eval_dataset=rows[28:], compute_metrics=right, **named
    )


def classification(kind: Any, model: Any, args: TrainingArguments, **named: Any) -> Any:
    """A trainer of a classifier of padded lines."""
    rows = classified_rows(40)
    return kind(
        model, args, train_dataset=rows[:32], eval_dataset=rows[32:], compute_metrics=right, **named
    )


def run(folder: Path, kinds: Any = KINDS, model: Any = causal_lm, **changes: Any) -> list[Any]:
    """A finished run of this Trainer, and one of transformers' own."""
    named = {k: changes.pop(k) for k in ("callbacks", "compute_loss_func") if k in changes}
    trainers = []
    for i, kind in enumerate(kinds):
        trainer = language(kind, model(), arguments(folder / str(i), **changes), **named)
        trainer.train()
        trainers.append(trainer)
    return trainers


ROUNDED = ("loss", "grad_norm", "eval_loss")
BF16: dict[str, Any] = {
    "bf16": True, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3,
}  # fmt: skip


def assert_near_run(ours: Any, eager: Any) -> None:
    """Assert that two runs with different rounding logged the same, losses and norms within 2
    percent."""
    found, want = history(ours), history(eager)
    assert len(found) == len(want)
    for mine, theirs in zip(found, want, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            if name in ROUNDED:
                assert abs(mine[name] - value) <= 0.02 * abs(value), (name, mine[name], value)
            elif name != "eval_right":
                assert mine[name] == value


def history(trainer: Any) -> list[dict[str, float]]:
    """The log of a run, without times."""
    logged = trainer.state.log_history
    return [{k: v for k, v in line.items() if k in LOGGED} for line in logged]


def assert_same_run(ours: Any, eager: Any) -> None:
    """Assert that two trainers have logged the same and that their models' weights are the same."""
    found, want = history(ours), history(eager)
    assert len(found) == len(want) > 0
    for a, b in zip(found, want, strict=True):
        assert a.keys() == b.keys(), (a, b)
        for name in a:
            torch.testing.assert_close(
                torch.tensor(float(a[name])), torch.tensor(float(b[name])), **CLOSE,
                msg=lambda m, n=name, line=b: f"{n} of {line}: {m}",
            )  # fmt: skip
    assert any("loss" in line for line in want)
    assert_same_weights(ours.model, eager.model)


def assert_same_weights(ours: torch.nn.Module, eager: torch.nn.Module, **close: Any) -> None:
    names = dict(eager.named_parameters())
    assert list(names) == [n for n, _ in ours.named_parameters()]
    for name, p in ours.named_parameters():
        torch.testing.assert_close(
            p, names[name], **(close or CLOSE), msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_close_tensors(
    found: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    at: str,
    near: Mapping[str, Any] = CLOSE,
) -> None:
    """Asserts that two runs have left tensors of the same names and about the same numbers."""
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, want[name], **near, msg=lambda m, n=name: f"{at}, {n}: {m}"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the lines that transformers prints."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(before)
        transformers.utils.logging.enable_progress_bar()


__all__ = [
    "CLOSE", "arguments", "assert_close_tensors", "assert_same_run", "assert_same_weights",
    "causal_lm", "classification", "classifier", "history", "language", "quiet", "right",
]  # fmt: skip
