"""Models of one layer, for tests that train many of them."""

from __future__ import annotations

from typing import Any

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)


def bert(kind: Any = BertForSequenceClassification, **changes: Any) -> Any:
    return kind(BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, **changes,
    ))  # fmt: skip


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=60, n_layer=1, n_embd=16, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    ))  # fmt: skip


def t5() -> Any:
    start: Any = {"decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        **start,
    ))  # fmt: skip
