"""A run of transformers' Trainer has one graph for training and one for evaluation, whatever saving
and logging write beside what the forward reads. The runs have the shapes of transformers' scripts:
batches padded to their longest row, a short last batch, evaluation in batches of another size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import arguments, quiet
from single_layers import bert, gpt2, t5
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    Seq2SeqTrainingArguments,
)

from onward.integrations.transformers import Seq2SeqTrainer, Trainer

Rows = list[dict[str, Any]]


def bart() -> Any:
    return BartForConditionalGeneration(BartConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=32, forced_eos_token_id=2,
    ))  # fmt: skip


def of_row(ids: list[int]) -> dict[str, Any]:
    return {"labels": len(ids) % 2}


def of_tokens(ids: list[int]) -> dict[str, Any]:
    return {"labels": [i % 3 if i % 2 else -100 for i in ids]}


def of_span(ids: list[int]) -> dict[str, Any]:
    return {"start_positions": 1, "end_positions": len(ids) - 1}


def of_language(ids: list[int]) -> dict[str, Any]:
    return {"labels": list(ids)}


def of_summary(ids: list[int]) -> dict[str, Any]:
    return {"labels": ids[: 2 + len(ids) // 3]}


RUNS: dict[str, tuple[Callable[[], Any], Callable[[list[int]], dict[str, Any]], bool]] = {
    "run_glue": (lambda: bert(BertForSequenceClassification), of_row, False),
    "run_mlm": (lambda: bert(BertForMaskedLM), of_tokens, False),
    "run_clm": (gpt2, of_language, False),
    "run_ner": (lambda: bert(BertForTokenClassification, num_labels=3), of_tokens, False),
    "run_qa": (lambda: bert(BertForQuestionAnswering), of_span, False),
    "run_summarization, T5": (t5, of_summary, True),
    "run_summarization, BART": (bart, of_summary, True),
}


def rows(count: int, answer: Callable[[list[int]], dict[str, Any]]) -> Rows:
    generator = torch.Generator().manual_seed(1)
    found: Rows = []
    for _ in range(count):
        length = int(torch.randint(5, 20, (1,), generator=generator))
        ids = torch.randint(3, 60, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "attention_mask": [1] * length, **answer(ids)})
    return found


def padded(given: Rows) -> dict[str, torch.Tensor]:
    """The rows as a batch, each column as long as its longest."""
    batch: dict[str, torch.Tensor] = {}
    for name, first in given[0].items():
        if isinstance(first, list):
            filler = -100 if name == "labels" else 0
            longest = max(len(row[name]) for row in given)
            held = [row[name] + [filler] * (longest - len(row[name])) for row in given]
        else:
            held = [row[name] for row in given]
        batch[name] = torch.tensor(held)
    return batch


class Unread(transformers.TrainerCallback):
    """Writes, after each save, into the configuration and the model what no forward reads."""

    def on_save(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        config = named["model"].config
        config._name_or_path = f"saved at {state.global_step}"
        config.transformers_version = str(state.global_step)
        config.id2label = {i: f"{state.global_step}-{i}" for i in range(3)}
        config.logs = list(state.log_history)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RUNS)
def test_one_graph_for_training_and_one_for_evaluation(
    name: str, tmp_path: Path, captures: list[int]
) -> None:
    make, answer, generates = RUNS[name]
    torch.manual_seed(0)
    model = make()
    shape: dict[str, Any] = {
        "max_steps": 7, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps",
        "eval_steps": 3, "per_device_eval_batch_size": 6, "logging_steps": 1,
    }  # fmt: skip
    kind: Any = Trainer
    args = arguments(tmp_path, **shape)
    if generates:
        kind = Seq2SeqTrainer
        plain = arguments(tmp_path, **shape).to_dict()
        named = {k: v for k, v in plain.items() if k in (*shape, "output_dir", "use_cpu")}
        more = {"report_to": "none", "disable_tqdm": True, "log_level": "error"}
        args = Seq2SeqTrainingArguments(
            **{**named, **more}, per_device_train_batch_size=4, predict_with_generate=True,
            generation_max_length=4,
        )  # fmt: skip
    trainer = kind(
        model, args, train_dataset=rows(14, answer), eval_dataset=rows(9, answer),
        data_collator=padded, callbacks=[Unread()],
    )  # fmt: skip
    with quiet():
        trainer.train()
    assert trainer.state.global_step == 7  # twice through the rows, each time with a short batch
    assert len(captures) == 2, "one for training, one for evaluation"
