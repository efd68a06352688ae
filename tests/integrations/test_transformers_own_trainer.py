"""transformers' own Trainer, unchanged, with an accelerated model: as with the eager model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import (
    BF16,
    arguments,
    assert_near_run,
    assert_same_run,
    assert_same_weights,
    causal_lm,
    classification,
    classifier,
    language,
)

import onward
from onward.module import accelerated

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, clipping, a schedule": {
        "gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
    },
    "epochs that end within a window": {
        "gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2,
    },
    "evaluation with metrics": {"eval_strategy": "steps", "eval_steps": 3},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "another optimizer": {"optim": "sgd", "learning_rate": 0.5},
    "activation checkpointing": {"activation_checkpointing": True},
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_a_language_model(changes: dict[str, Any], tmp_path: Path, captures: list[int]) -> None:
    eager = language(transformers.Trainer, causal_lm(), arguments(tmp_path, **changes))
    model = onward.accelerate(causal_lm(), strict=True)
    ours = language(transformers.Trainer, model, arguments(tmp_path, **changes))
    for trainer in (eager, ours):
        trainer.train()
    assert_same_run(ours, eager)
    assert ran(model)
    assert len(captures) == 1


def test_a_classifier(tmp_path: Path, captures: list[int]) -> None:
    changes: dict[str, Any] = {"eval_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}
    eager = classification(transformers.Trainer, classifier(), arguments(tmp_path, **changes))
    model = onward.accelerate(classifier(), strict=True)
    ours = classification(transformers.Trainer, model, arguments(tmp_path, **changes))
    for trainer in (eager, ours):
        trainer.train()
    assert_same_run(ours, eager)
    found, want = (t.predict(t.eval_dataset).predictions for t in (ours, eager))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=2e-4, atol=2e-5)
    assert ran(model) and len(captures) == 1  # the evaluation's is made of it


@pytest.mark.sample(2)
@pytest.mark.parametrize("first, second", [(True, True), (True, False), (False, True)])
def test_a_checkpoint_is_resumed(first: bool, second: bool, tmp_path: Path) -> None:
    """From one kind of model to the other, as if the run had not been broken off."""
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    whole = language(transformers.Trainer, causal_lm(), arguments(tmp_path / "whole"))
    whole.train()
    broken = language(transformers.Trainer, made(first), arguments(tmp_path / "b", **changes))
    broken.train()
    resumed = language(transformers.Trainer, made(second), arguments(tmp_path / "b", **changes))
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    assert_same_weights(resumed.model, whole.model)
    loaded: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "b" / "checkpoint-6")
    assert_same_weights(loaded, whole.model)
    assert ran(resumed.model) == second


def test_dropout_is_the_same_after_a_resume(tmp_path: Path) -> None:
    """With `outputs` said: a model that has to see what is read runs its first call with all rows,
    and the sums of a resumed run's first step have another order."""
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    for resume in (None, str(tmp_path / "checkpoint-3")):
        model = onward.accelerate(causal_lm(dropout=0.2), strict=True, outputs="loss")
        trainer = language(transformers.Trainer, model, arguments(tmp_path, **changes))
        trainer.train(resume_from_checkpoint=resume)
        if resume is None:
            whole = trainer.model
    assert_same_weights(model, whole, rtol=0, atol=0)


def made(accelerates: bool) -> Any:
    return onward.accelerate(causal_lm(), strict=True) if accelerates else causal_lm()


def ran(model: Any) -> bool:
    held = accelerated(model)
    return held is not None and len(held.plan.launches) > 0


def test_bf16(tmp_path: Path, captures: list[int]) -> None:
    """Calls are under autocast: a graph, with no warning."""
    model = onward.accelerate(causal_lm(), strict=True)
    eager = language(transformers.Trainer, causal_lm(), arguments(tmp_path, **BF16))
    ours = language(transformers.Trainer, model, arguments(tmp_path, **BF16))
    for trainer in (eager, ours):
        trainer.train()
    assert_near_run(ours, eager)
    assert ran(model)
    assert len(captures) == 1
