"""Models that are trained from random weights, by name, as configurations of transformers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Family = Literal["gpt2", "llama", "bert", "roberta", "t5", "vit", "whisper"]
POSITIONS_PER_S, _MELS = 50, 80  # of Whisper's encoder; bands of a spectrogram


@dataclass(frozen=True)
class Preset:
    """One size of a family.

    layers, width, heads: transformer blocks (of T5 and Whisper, in each of encoder and decoder),
    features D of the residual stream, heads per block.
    positions: longest sequence in tokens; of T5, which has no such limit, a usual one.
    vocab_size: tokens of the vocabulary V, unless the tokenizer has another number.
    learning_rate: peak rate of AdamW that trains this size from random weights.
    image_size, patch_size: pixels along an image and along a patch; 0 where there are none.
    sound_s: seconds of sound that the encoder hears; 0 where it hears none.
    """

    layers: int
    width: int
    heads: int
    positions: int
    vocab_size: int
    learning_rate: float
    family: Family = "gpt2"
    image_size: int = 0
    patch_size: int = 0
    sound_s: int = 0


PRESETS: dict[str, Preset] = {
    # two wide blocks learn more per second on a CPU than four narrow ones of equal cost
    "gpt2-tiny": Preset(2, 256, 4, 512, 4096, 1e-3),
    "gpt2-small": Preset(12, 768, 12, 1024, 50257, 6e-4),
    "gpt2-medium": Preset(24, 1024, 16, 1024, 50257, 3e-4),
    "gpt2-large": Preset(36, 1280, 20, 1024, 50257, 2.5e-4),
    "gpt2-xl": Preset(48, 1600, 25, 1024, 50257, 2e-4),
    # Turing-NLG (Microsoft, 2020): 17 billion weights
    "turing-17b": Preset(78, 4256, 28, 1024, 50257, 1.5e-4),
    "llama-tiny": Preset(2, 256, 4, 512, 4096, 1e-3, "llama"),
    "bert-tiny": Preset(2, 256, 4, 512, 4096, 1e-3, "bert"),
    "bert-base": Preset(12, 768, 12, 512, 30522, 1e-4, "bert"),
    "bert-large": Preset(24, 1024, 16, 512, 30522, 1e-4, "bert"),
    "roberta-tiny": Preset(2, 256, 4, 512, 4096, 1e-3, "roberta"),
    "t5-tiny": Preset(2, 256, 4, 512, 4096, 1e-3, "t5"),
    "vit-tiny": Preset(4, 128, 4, 65, 0, 1e-3, "vit", image_size=32, patch_size=4),
    "whisper-tiny": Preset(2, 128, 4, 64, 300, 1e-3, "whisper", sound_s=2),
}


_DEFAULTS = {
    "causal-lm": "gpt2-tiny",
    "seq2seq-lm": "t5-tiny",
    "text-denoising": "t5-tiny",
    "image-classification": "vit-tiny",
    "automatic-speech-recognition": "whisper-tiny",
}


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
    if p.family == "vit":
        return transformers.ViTConfig(
            image_size=p.image_size,
            patch_size=p.patch_size,
            hidden_size=p.width,
            intermediate_size=4 * p.width,
            num_hidden_layers=p.layers,
            num_attention_heads=p.heads,
        )
    if p.family == "whisper":
        end = ids["eos_token_id"] if ids["eos_token_id"] is not None else 1
        return transformers.WhisperConfig(
            vocab_size=vocab_size,
            num_mel_bins=_MELS,
            max_source_positions=POSITIONS_PER_S * p.sound_s,
            max_target_positions=p.positions,
            d_model=p.width,
            encoder_layers=p.layers,
            decoder_layers=p.layers,
            encoder_attention_heads=p.heads,
            decoder_attention_heads=p.heads,
            encoder_ffn_dim=4 * p.width,
            decoder_ffn_dim=4 * p.width,
            pad_token_id=ids["pad_token_id"] or 0,
            bos_token_id=end,
            eos_token_id=end,
            decoder_start_token_id=end,
            suppress_tokens=None,  # both are of OpenAI's vocabulary
            begin_suppress_tokens=None,
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


__all__ = ["POSITIONS_PER_S", "PRESETS", "Family", "Preset", "default_model", "preset_config"]
