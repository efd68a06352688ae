"""Loops of our own in the shapes of the usual training scripts, beside transformers' Trainer.

Each is a tiny model, rows made as such a script makes them, and the data collator that it takes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent))

import assets
from clock import Clock
from scripts import HEAD, Ran, difference, row

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """make: a model, rows, a collator. seq2seq: by Seq2SeqTrainer. arguments: more of them."""

    make: Callable[[Any], tuple[Any, Rows, Any]]
    seq2seq: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def _blocks(words: Any, length: int = 24) -> Rows:
    """Lines joined and cut into blocks, as language models are trained on."""
    ids = list(chain(*words(assets.lines()[:200])["input_ids"]))
    cut = [ids[i : i + length] for i in range(0, len(ids) - length, length)]
    return [{"input_ids": x, "attention_mask": [1] * length} for x in cut]


def clm(words: Any) -> tuple[Any, Rows, Any]:
    rows = [{**r, "labels": list(r["input_ids"])} for r in _blocks(words)]
    return assets.model("gpt2"), rows, transformers.default_data_collator


def mlm(words: Any) -> tuple[Any, Rows, Any]:
    collator = transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.3)
    return assets.model("bert"), _blocks(words), collator


def _bert(kind: type, **config: Any) -> Any:
    plain = assets.model("bert").config
    torch.manual_seed(0)
    return kind(transformers.BertConfig(**{**plain.to_diff_dict(), **config}))


def glue(words: Any) -> tuple[Any, Rows, Any]:
    lines = assets.lines()[:200]
    rows = [
        {**words(a, b, truncation=True, max_length=40), "label": int("(" in a)}
        for a, b in pairwise(lines)
    ]
    model = _bert(transformers.BertForSequenceClassification, num_labels=2)
    return model, rows, transformers.DataCollatorWithPadding(words)


def ner(words: Any) -> tuple[Any, Rows, Any]:
    rows = []
    for line in assets.lines()[:200]:
        found = words(line.split(), is_split_into_words=True, truncation=True, max_length=32)
        places = found.word_ids()
        found["labels"] = [-100 if w is None else w % 3 for w in places]
        rows.append(dict(found))
    model = _bert(transformers.BertForTokenClassification, num_labels=3)
    return model, rows, transformers.DataCollatorForTokenClassification(words)


def qa(words: Any) -> tuple[Any, Rows, Any]:
    rows = []
    for i, line in enumerate(assets.lines()[:200]):
        found = words("what is it", line, truncation="only_second", max_length=32,
                      padding="max_length")  # fmt: skip
        rows.append({**found, "start_positions": 5 + i % 3, "end_positions": 6 + i % 3})
    model = _bert(transformers.BertForQuestionAnswering)
    return model, rows, transformers.default_data_collator


def _pairs(words: Any) -> tuple[Any, Rows, Any]:
    lines, model = assets.lines()[:200], assets.model("t5")
    rows = [
        {**words(a, truncation=True, max_length=24),
         "labels": words(text_target=b, truncation=True, max_length=20)["input_ids"]}
        for a, b in pairwise(lines)
    ]  # fmt: skip
    return model, rows, transformers.DataCollatorForSeq2Seq(words, model=model)


SHAPES = {
    "clm": Shape(clm), "mlm": Shape(mlm), "glue": Shape(glue), "ner": Shape(ner), "qa": Shape(qa),
    "summarization": Shape(_pairs, seq2seq=True),
    "translation": Shape(_pairs, seq2seq=True, arguments={"gradient_accumulation_steps": 2}),
}  # fmt: skip


def run(name: str, ours: bool, steps: int, **more: Any) -> Ran:
    """A shape's loop with transformers' Trainer, or with Onward's."""
    shape = SHAPES[name]
    model, rows, collator = shape.make(assets.tokenizer())
    kind = "Seq2SeqTrainer" if shape.seq2seq else "Trainer"
    arguments = "Seq2SeqTrainingArguments" if shape.seq2seq else "TrainingArguments"
    if ours:
        import onward.integrations.transformers as place
    else:
        place = transformers
    with tempfile.TemporaryDirectory() as folder:
        args = getattr(transformers, arguments)(
            output_dir=folder, use_cpu=True, max_steps=steps, logging_steps=1, report_to="none",
            disable_tqdm=True, save_strategy="no", per_device_train_batch_size=4, log_level="error",
            learning_rate=1e-3, dataloader_pin_memory=False, **{**shape.arguments, **more},
        )  # fmt: skip
        clock = Clock()
        trainer = getattr(place, kind)(
            model, args, train_dataset=rows, data_collator=collator, callbacks=[clock]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return Ran([x for x in trainer.state.log_history if "loss" in x], clock.steps)


def main() -> None:
    """The table of first steps."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    print(HEAD.format(n=given.steps))
    for name in given.names:
        stock, ours = (run(name, side, given.steps) for side in (False, True))
        print(row(name, stock, ours), flush=True)
        if found := difference(stock, ours):
            print(f"{name} differs: {found}", file=sys.stderr)


if __name__ == "__main__":
    main()
