"""GPT-2 in three sizes, as Hugging Face configurations for training from scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GPT2Config


@dataclass(frozen=True)
class Preset:
    """One size of GPT-2.

    layers, width, heads: transformer blocks, features D of the residual stream, heads per block.
    positions: longest sequence in tokens.
    vocab_size: tokens of the vocabulary V, unless the tokenizer has another number.
    learning_rate: peak rate of AdamW that trains this size from random weights.
    """

    layers: int
    width: int
    heads: int
    positions: int
    vocab_size: int
    learning_rate: float


PRESETS: dict[str, Preset] = {
    # two wide blocks learn more per second on a CPU than four narrow ones of equal cost
    "gpt2-tiny": Preset(2, 256, 4, 512, 4096, 1e-3),
    "gpt2-small": Preset(12, 768, 12, 1024, 50257, 6e-4),
    "gpt2-medium": Preset(24, 1024, 16, 1024, 50257, 3e-4),
}


def gpt2_config(name: str, vocab_size: int, eos_token_id: int | None) -> GPT2Config:
    """The configuration of preset `name` for a vocabulary of `vocab_size` tokens."""
    from transformers import GPT2Config

    preset = PRESETS[name]
    return GPT2Config(
        vocab_size=vocab_size,
        n_positions=preset.positions,
        n_embd=preset.width,
        n_layer=preset.layers,
        n_head=preset.heads,
        bos_token_id=eos_token_id,
        eos_token_id=eos_token_id,
    )
