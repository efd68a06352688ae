"""Models of one layer, for tests that train many of them."""

from __future__ import annotations

from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=60, n_layer=1, n_embd=16, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    ))  # fmt: skip
