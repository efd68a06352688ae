"""Runs of onward.fit and of transformers' Trainer over the same samples, and what they train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer as HFTrainer
from transformers import TrainerCallback, TrainingArguments

import onward
from onward.fitting import FitResult

F = nn.functional
EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
TRAIN, EVAL, BATCH = 21, 7, 4


class Classifier(nn.Module):
    """x f32[B,6], labels i64[B] -> loss f32[], logits f32[B,3]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Recorder(TrainerCallback):
    """Notes each event with the update and the epoch at which it comes."""

    def __init__(self, act: Callable[[str, Any, Any], None] = lambda *_: None) -> None:
        self.seen: list[tuple[str, int, float]] = []
        self.act = act


def _noting(name: str) -> Callable[..., None]:
    def note(self: Recorder, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append((name, state.global_step, round(state.epoch or 0.0, 4)))
        self.act(name, state, control)

    return note


for _name in EVENTS:
    setattr(Recorder, _name, _noting(_name))


def samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(6, generator=made),
            "labels": torch.randint(0, 3, (), generator=made),
        }
        for _ in range(count)
    ]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def accuracy(found: Any) -> dict[str, float]:
    predictions, labels = found
    return {"accuracy": float((predictions.argmax(-1) == labels).mean())}


def model() -> Classifier:
    torch.manual_seed(3)
    return Classifier()


DATA, HELD_OUT = samples(TRAIN, 0), samples(EVAL, 1)


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return (
        DataLoader(DATA, BATCH, collate_fn=collate),  # type: ignore[arg-type]
        DataLoader(HELD_OUT, BATCH, collate_fn=collate),  # type: ignore[arg-type]
    )


class InOrder(HFTrainer):
    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(DATA)


def by_transformers(
    net: nn.Module, window: int, folder: Path, callbacks: list[Any], **options: Any
) -> HFTrainer:
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=window,
        learning_rate=0.5,
        optim="sgd",
        max_grad_norm=1.0,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    trainer = InOrder(
        net,
        arguments,
        train_dataset=DATA,  # type: ignore[arg-type]
        eval_dataset=HELD_OUT,  # type: ignore[arg-type]
        data_collator=collate,
        compute_metrics=accuracy,
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


def by_onward(
    net: nn.Module, window: int, folder: Path, callbacks: list[Any], **options: Any
) -> FitResult:
    trainer = onward.Trainer(
        net,
        torch.optim.SGD(net.parameters(), lr=0.5),
        options={
            "gradient_accumulation_steps": window,
            "max_grad_norm": 1.0,
            "gradient_accumulation_average": "micro_batches",
        },
    )
    train, held_out = loaders()
    return onward.fit(
        trainer,
        train,
        held_out,
        options={"output_dir": str(folder), **options},
        compute_metrics=accuracy,
        callbacks=callbacks,
    )


def fitted(
    folder: Path | None = None,
    callbacks: Any = (),
    size: int = BATCH,
    trainer: onward.Trainer | None = None,
    scheduled: Any = None,
    **options: Any,
) -> FitResult:
    """A run over DATA in order, by default of a new Trainer, which has an evaluation."""
    if trainer is None:
        trainer = onward.Trainer(net := model(), torch.optim.SGD(net.parameters(), lr=0.5))
    return onward.fit(
        trainer,
        onward.data.ResumableDataLoader(DATA, size, shuffle=False, collate_fn=collate),
        loaders()[1],
        options={"output_dir": None if folder is None else str(folder), **options},
        lr_scheduler=None if scheduled is None else scheduled(trainer.optimizer),
        compute_metrics=accuracy,
        callbacks=callbacks,
    )
