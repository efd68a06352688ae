"""Loops whose collator draws: its masks of tokens are those of eager PyTorch, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import arguments, assert_same_weights, causal_lm, history, language
from tokenizing import LINES, tokenizer
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling

import onward
from onward.integrations.transformers import Trainer

STEPS = 4
CLOSE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-6}


def masked_lm(dropout: float = 0.0) -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForMaskedLM(config).train()


class Collator(DataCollatorForLanguageModeling):
    """Keeps what it has masked, and torch's random state behind each batch's collation."""

    def __init__(self) -> None:
        super().__init__(tokenizer(), mlm_probability=0.3, pad_to_multiple_of=16)
        self.seen: list[torch.Tensor] = []

    def torch_call(self, examples: Any) -> Any:
        batch = super().torch_call(examples)
        self.seen += [batch["input_ids"], batch["labels"], torch.get_rng_state()]
        return batch


def rows() -> list[dict[str, Any]]:
    return [dict(tokenizer()(line, return_special_tokens_mask=True)) for line in LINES[:32]]


def same_draws(a: Collator, b: Collator) -> bool:
    return len(a.seen) == len(b.seen) > 0 and all(map(torch.equal, a.seen, b.seen))


# ---- one's own loop


def batches(collator: Collator) -> Iterable[dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    while True:
        yield from torch.utils.data.DataLoader(
            rows(),  # type: ignore[arg-type]
            batch_size=8, shuffle=True, collate_fn=collator,
        )  # fmt: skip


def by_trainer(model: Any, collator: Collator) -> list[float]:
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    pairs = zip(range(STEPS), batches(collator), strict=False)
    return [float(trainer.train_step(dict(batch)).loss) for _, batch in pairs]


def by_hand(model: Any, collator: Collator) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _, batch in zip(range(STEPS), batches(collator), strict=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def accelerated(model: Any, collator: Collator) -> list[float]:
    return by_hand(onward.accelerate(model, strict=True), collator)


@pytest.mark.parametrize("run", [by_trainer, accelerated])
def test_a_loop_of_one_s_own(run: Any) -> None:
    eager, ours = Collator(), Collator()
    want, found = by_hand(masked_lm(), eager), run(masked_lm(), ours)
    assert same_draws(ours, eager)
    torch.testing.assert_close(found, want, **CLOSE)


def test_with_dropout_the_step_of_a_trainer_moves_nothing() -> None:
    """The collator's batches are those of a run without dropout."""
    eager, ours = Collator(), Collator()
    by_hand(masked_lm(), eager)
    by_trainer(masked_lm(dropout=0.3), ours)
    assert same_draws(ours, eager)


def test_with_dropout_a_call_moves_nothing_that_is_drawn() -> None:
    eager, ours = Collator(), Collator()
    by_hand(masked_lm(), eager)
    accelerated(masked_lm(dropout=0.3), ours)
    tokens = [[x for i, x in enumerate(c.seen) if i % 3 < 2] for c in (ours, eager)]
    assert all(map(torch.equal, *tokens))


# ---- transformers' Trainer


def trained(kind: Any, model: Any, folder: Path, **changes: Any) -> tuple[Any, Collator]:
    collator = Collator()
    evaluated: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": STEPS}
    args = arguments(folder, **{**evaluated, **changes})
    made = kind(model, args, train_dataset=rows(), eval_dataset=rows()[:8], data_collator=collator)
    made.train()
    return made, collator


def accelerated_in_stock(model: Any, *args: Any, **kwargs: Any) -> Any:
    return transformers.Trainer(onward.accelerate(model), *args, **kwargs)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", [Trainer, accelerated_in_stock])
def test_a_masked_language_model(kind: Any, every: int, tmp_path: Path) -> None:
    """Losses of training and evaluation are the stock Trainer's, and so is each token masked."""
    changes = {"gradient_accumulation_steps": every, "learning_rate": 1e-2}
    stock, eager = trained(transformers.Trainer, masked_lm(), tmp_path, **changes)
    made, ours = trained(kind, masked_lm(), tmp_path, **changes)
    assert same_draws(ours, eager)
    for mine, theirs in zip(history(made), history(stock), strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, **CLOSE, msg=name)


def told_in_stock(model: Any, *args: Any, **kwargs: Any) -> Any:
    """An accelerated model that is told what the loop reads. One that has to see it runs its first
    call, hence that of a resumed run, with all rows, and sums in another order."""
    return transformers.Trainer(onward.accelerate(model, outputs="loss"), *args, **kwargs)


@pytest.mark.parametrize("kind", [Trainer, told_in_stock])
def test_a_run_with_dropout_is_resumed_to_the_bit(kind: Any, tmp_path: Path) -> None:
    """By transformers' own checkpoint, in the midst of an epoch, with an optimizer that does not
    count its updates."""
    changes: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2,
        "optim": "sgd", "learning_rate": 1e-2, "max_steps": STEPS,
    }  # fmt: skip
    made = []
    for point in (None, str(tmp_path / "checkpoint-2")):
        made.append(language(kind, causal_lm(dropout=0.3), arguments(tmp_path, **changes)))
        torch.rand(3)
        made[-1].train(resume_from_checkpoint=point)
    whole, resumed = made
    assert history(resumed) == history(whole)
    assert_same_weights(resumed.model, whole.model, rtol=0, atol=0)


def test_steps_outside_a_loop_have_numbers_of_their_own(tmp_path: Path) -> None:
    """`training_step` called by hand, where nobody counts steps."""
    args = arguments(tmp_path, learning_rate=0.0)
    made = Trainer(masked_lm(dropout=0.3), args, train_dataset=rows(), data_collator=Collator())
    made.create_optimizer_and_scheduler(8)
    made.current_gradient_accumulation_steps = 1
    batch = next(iter(made.get_train_dataloader()))
    losses = [float(made.training_step(made.model, dict(batch))) for _ in range(4)]
    assert len(set(losses)) == 4
