"""Models that are trained from random weights, by name, as configurations of transformers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Family = Literal["gpt2", "llama", "bert", "roberta", "t5"]


@dataclass(frozen=True)
class Preset:
    """One size of a family.

    layers, width, heads: transformer blocks (of T5, in each of encoder and decoder), features D of
    the residual stream, heads per block.
    positions: longest sequence in tokens; of T5, which has no such limit, a usual one.
    vocab_size: tokens of the vocabulary V, unless the tokenizer has another number.
    learning_rate: peak rate of AdamW that trains this size from random weights.
    """

    layers: int
    width: int
    heads: int
    positions: int
    vocab_size: int
    learning_rate: float
    family: Family = "gpt2"


PRESETS: dict[str, Preset] = {
    # two wide blocks learn more per second on a CPU than four narrow ones of equal cost
    "gpt2-tiny": Preset(2, 256, 4, 512, 4096, 1e-3),
    "gpt2-small": Preset(12, 768, 12, 1024, 50257, 6e-4),
    "gpt2-medium": Preset(24, 1024, 16, 1024, 50257, 3e-4),
    "gpt2-large": Preset(36, 1280, 20, 1024, 50257, 2.5e-4),
    "gpt2-xl": Preset(48, 1600, 25, 1024, 50257, 2e-4),
    "llama-tiny": Preset(2, 256, 4, 512, 4096, 1e-3, "llama"),
    "bert-tiny": Preset(2, 256, 4, 512, 4096, 1e-3, "bert"),
    "bert-base": Preset(12, 768, 12, 512, 30522, 1e-4, "bert"),
    "bert-large": Preset(24, 1024, 16, 512, 30522, 1e-4, "bert"),
    "roberta-tiny": Preset(2, 256, 4, 512, 4096, 1e-3, "roberta"),
    "t5-tiny": Preset(2, 256, 4, 512, 4096, 1e-3, "t5"),
}


_DEFAULTS = {"causal-lm": "gpt2-tiny", "seq2seq-lm": "t5-tiny", "text-denoising": "t5-tiny"}


def default_model(task: str) -> str:
    """The preset that a task trains where no model is named."""
    return _DEFAULTS.get(task, "bert-tiny")


def preset_config(name: str, vocab_size: int, tokenizer: Any = None) -> PreTrainedConfig:
    """The configuration of preset `name` for a vocabulary of `vocab_size` tokens, of which the
    tokenizer names the special ones."""
    transformers: Any = importlib.import_module("transformers")
    p = PRESETS[name]
    ids = {
        kind: found if isinstance(found := getattr(tokenizer, kind, None), int) else None
        for kind in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    if p.family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=vocab_size,
            n_positions=p.positions,
            n_embd=p.width,
            n_layer=p.layers,
            n_head=p.heads,
            bos_token_id=ids["eos_token_id"],
            eos_token_id=ids["eos_token_id"],
        )
    if p.family == "llama":
        return transformers.LlamaConfig(
            vocab_size=vocab_size,
            max_position_embeddings=p.positions,
            hidden_size=p.width,
            intermediate_size=p.width * 8 // 3 // 64 * 64,
            num_hidden_layers=p.layers,
            num_attention_heads=p.heads,
            num_key_value_heads=p.heads // 2,
            tie_word_embeddings=True,
            **{**ids, "bos_token_id": ids["eos_token_id"]},
        )
    if p.family == "t5":
        pad = ids["pad_token_id"] or 0
        return transformers.T5Config(
            vocab_size=vocab_size,
            d_model=p.width,
            d_ff=4 * p.width,
            d_kv=p.width // p.heads,
            num_layers=p.layers,
            num_heads=p.heads,
            pad_token_id=pad,
            decoder_start_token_id=pad,
            eos_token_id=ids["eos_token_id"] if ids["eos_token_id"] is not None else 1,
        )
    kind = transformers.RobertaConfig if p.family == "roberta" else transformers.BertConfig
    more: dict[str, Any] = {}
    if p.family == "roberta":
        more = {"type_vocab_size": 1}
        more |= {n: ids[n] for n in ("bos_token_id", "eos_token_id") if ids[n] is not None}
    pad = ids["pad_token_id"] or 0
    # the positions of RoBERTa begin behind the number of its padding token
    behind = pad + 1 if p.family == "roberta" else 0
    return kind(
        vocab_size=vocab_size,
        max_position_embeddings=p.positions + behind,
        hidden_size=p.width,
        intermediate_size=4 * p.width,
        num_hidden_layers=p.layers,
        num_attention_heads=p.heads,
        pad_token_id=pad,
        **more,
    )


__all__ = ["PRESETS", "Family", "Preset", "default_model", "preset_config"]
