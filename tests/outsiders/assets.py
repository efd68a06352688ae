"""Tiny models, a tokenizer and files of data for scripts that would download theirs.

The text is the sources of Python's standard library; the models are made, not trained, and have no
dropout.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import json
import json.decoder
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST = 64
WORDS = 400
TAGS = ("NAME", "MARK", "WORD")


def lines() -> list[str]:
    """Lines of words of the standard library's sources."""
    text = "\n".join(map(inspect.getsource, (argparse, json.decoder, textwrap)))
    found = (" ".join(re.findall(r"\w+|[^\w\s]", line)) for line in text.splitlines())
    return [line for line in found if len(line.split()) > 3]


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = Counter(word for line in lines() for word in line.split())
    kept = [*SPECIAL, *(w for w, _ in sorted(words.items(), key=lambda x: (-x[1], x[0])))][:WORDS]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(kept)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    made.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )  # fmt: skip
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", bos_token="[CLS]", eos_token="[SEP]",
        model_max_length=LONGEST,
    )  # fmt: skip


def model(kind: str) -> transformers.PreTrainedModel:
    """`gpt2`, `bert` or `t5`, as wide as two words."""
    torch.manual_seed(0)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=WORDS, n_layer=2, n_embd=32, n_head=2, n_positions=LONGEST, bos_token_id=2,
            eos_token_id=3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ))  # fmt: skip
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=LONGEST, pad_token_id=0,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
        ))  # fmt: skip
    start: dict[str, Any] = {"decoder_start_token_id": 0}  # which no signature names
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=3, **start,
    ))  # fmt: skip


def saved(kind: str, folder: Path) -> str:
    """The folder of a model and its tokenizer."""
    place = folder / kind
    if not place.exists():
        transformers.utils.logging.disable_progress_bar()
        model(kind).save_pretrained(place)
        tokenizer().save_pretrained(place)
    return str(place)


def data(task: str, folder: Path) -> str:
    """The path of a file of rows as a script of that task reads them."""
    rows = [_row(task, i, line, _next(i)) for i, line in enumerate(lines()[:240])]
    if task == "text":
        place = folder / "text.txt"
        place.write_text("\n".join(lines()[:600]))
    elif task == "classes":
        place = folder / "classes.csv"
        with place.open("w") as file:
            out = csv.DictWriter(file, list(rows[0]))
            out.writeheader()
            out.writerows(rows)
    else:
        place = folder / f"{task}.json"
        text = "\n".join(map(json.dumps, rows))
        place.write_text(json.dumps({"data": rows}) if task == "answers" else text)
    return str(place)


def _next(i: int) -> str:
    return lines()[i + 1]


def _row(task: str, i: int, line: str, after: str) -> dict[str, Any]:
    words = line.split()
    if task == "classes":
        return {"sentence1": line, "sentence2": after, "label": int("(" in line)}
    if task == "tags":
        kinds = [TAGS[0] if w.isidentifier() and w.islower() else TAGS[1] if not w.isalnum()
                 else TAGS[2] for w in words]  # fmt: skip
        return {"tokens": words, "ner_tags": kinds}
    if task == "answers":
        at = line.index(words[1], len(words[0]))
        return {
            "id": str(i), "title": "", "context": line, "question": f"what is after {words[0]}",
            "answers": {"text": [words[1]], "answer_start": [at]},
        }  # fmt: skip
    if task == "summaries":
        return {"document": line, "summary": after}
    return {"translation": {"en": line, "ro": after}}
