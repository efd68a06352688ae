"""A model of each family of transformers, from its configuration, and the batches that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from suite.batches import Batch, causal_batch, padded_masked_batch
from suite.cases import Case
from suite.workload import Workload

_NARROW = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "d_model": 64, "d_kv": 16, "d_ff": 96,
    "num_layers": 2, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "vocab_size": 1000, "projection_dim": 64,
}  # fmt: skip
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = {
    "vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 1024, "use_cache": False, **_TOKENS,
}  # fmt: skip
_LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "use_cache": False, **_TOKENS,
}  # fmt: skip
_ENCODER = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8,
}  # fmt: skip


def _sized(case: Case, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as given, or narrowed where the case is tiny, nested configurations included."""
    if case.size != "tiny":
        return dict(settings)
    return {
        k: _sized(case, v) if isinstance(v, dict) else _NARROW.get(k, v)
        for k, v in settings.items()
    }


def _of(
    config: str, model: str, settings: Mapping[str, Any], dropouts: tuple[str, ...] = ()
) -> Callable[[Case], nn.Module]:
    """A builder. dropouts: the fields that take the case's."""

    def build(case: Case) -> nn.Module:
        more = dict.fromkeys(dropouts, case.dropout)
        made = getattr(transformers, config)(**_sized(case, settings), **more)
        return getattr(transformers, model)(made)

    return build


def _words(size: int) -> Callable[[Case], int]:
    return lambda case: 1000 if case.size == "tiny" else size


def _class_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    """Padded sequences, each with one of two classes."""
    batch = padded_masked_batch(case, ids, generator)
    batch["labels"] = torch.randint(0, 2, (case.batch,), generator=generator)
    return batch


def _translated_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    """Labels half as long as what is read."""
    del generator
    tokens = ids[: case.batch * case.tokens].reshape(case.batch, case.tokens)
    return {"input_ids": tokens, "labels": tokens[:, ::2].contiguous()}


def _images(case: Case, generator: torch.Generator) -> Tensor:
    size = 32 if case.size == "tiny" else 224
    return torch.randn(case.batch, 3, size, size, generator=generator)


def _image_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    del ids
    labels = torch.randint(0, 1000, (case.batch,), generator=generator)
    return {"pixel_values": _images(case, generator), "labels": labels}


def _spoken_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    """Thirty seconds of noise as a spectrogram."""
    frames = 128 if case.size == "tiny" else 3000
    heard = torch.randn(case.batch, 80, frames, generator=generator)
    labels = ids[: case.batch * case.tokens].reshape(case.batch, case.tokens)
    return {"input_features": heard, "labels": labels}


def _captioned_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    batch = padded_masked_batch(case, ids, generator)
    last = batch["attention_mask"].sum(1, keepdim=True) - 1
    return {
        "input_ids": batch["input_ids"].scatter(1, last, 2),  # where the caption ends
        "attention_mask": batch["attention_mask"],
        "pixel_values": _images(case, generator),
    }


class _Pairs(nn.Module):
    """A CLIP that always returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        """The contrastive loss of a batch in which each image has its caption at the same index."""
        return self.model(**batch, return_loss=True).loss


def _clip(case: Case) -> nn.Module:
    image = {"image_size": 32 if case.size == "tiny" else 224, "patch_size": 16}
    build = _of(
        "CLIPConfig", "CLIPModel",
        {
            "text_config": {
                **_ENCODER, **_TOKENS, "vocab_size": 49408, "max_position_embeddings": 77,
            },
            "vision_config": {**_ENCODER, **image},
            "projection_dim": 512,
        },
    )  # fmt: skip
    return _Pairs(build(case))


def _vit(case: Case) -> nn.Module:
    size = 32 if case.size == "tiny" else 224
    settings = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4,
        "num_attention_heads": 12, "num_labels": 1000, "image_size": size,
    }  # fmt: skip
    return _of("ViTConfig", "ViTForImageClassification", settings)(case)


def _whisper(case: Case) -> nn.Module:
    settings = {
        "vocab_size": 51865, "d_model": 384, "encoder_layers": 4, "decoder_layers": 4,
        "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 1536,
        "decoder_ffn_dim": 1536, "use_cache": False, "decoder_start_token_id": 1,
        "max_source_positions": 64 if case.size == "tiny" else 1500, **_TOKENS,
    }  # fmt: skip
    made = _of("WhisperConfig", "WhisperForConditionalGeneration", settings, ("dropout",))
    return made(case)


FAMILY_MODELS: dict[str, Workload] = {
    "llama": Workload(
        _of("LlamaConfig", "LlamaForCausalLM", {**_DECODER, "intermediate_size": 1408}),
        _words(32000), causal_batch,
        "Llama, 4 layers, 512 wide, 8 heads over 4 of keys, V=32000",
    ),
    "llama_1b": Workload(
        _of("LlamaConfig", "LlamaForCausalLM", _LLAMA_1B), _words(128256), causal_batch,
        "Llama 3.2 of 1.2 B weights, 16 layers, 2048 wide, 32 heads over 8 of keys, V=128256",
    ),
    "qwen3": Workload(
        _of(
            "Qwen3Config", "Qwen3ForCausalLM",
            {**_DECODER, "intermediate_size": 1536, "head_dim": 64},
        ),
        _words(32000), causal_batch,
        "Qwen3, 4 layers, 512 wide, 8 heads over 4 of keys, V=32000",
    ),
    "qwen3_moe": Workload(
        _of(
            "Qwen3MoeConfig",
            "Qwen3MoeForCausalLM",
            {
                **_DECODER,
                "intermediate_size": 768,
                "moe_intermediate_size": 768,
                "num_hidden_layers": 2,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "head_dim": 64,
            },
        ),
        _words(32000),
        causal_batch,
        "Qwen3-MoE, 2 layers, 512 wide, 2 of 8 experts a token, V=32000",
    ),
    "vit": Workload(
        _vit, _words(1000), _image_batch, "ViT-B/16, 4 of its layers, images of 224 x 224",
    ),
    "whisper": Workload(
        _whisper, _words(51865), _spoken_batch, "Whisper-tiny, 30 seconds, V=51865",
    ),
    "modernbert": Workload(
        _of(
            "ModernBertConfig", "ModernBertForMaskedLM",
            {
                **_ENCODER, "intermediate_size": 768, "vocab_size": 50368, **_TOKENS,
                "cls_token_id": 1, "sep_token_id": 2, "max_position_embeddings": 1024,
            },
        ),
        _words(50368), padded_masked_batch,
        "ModernBERT MLM, 4 layers, 512 wide, 8 heads, V=50368",
    ),
    "deberta": Workload(
        _of(
            "DebertaV2Config", "DebertaV2ForMaskedLM",
            {
                **_ENCODER, "vocab_size": 32000, "relative_attention": True,
                "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
                "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
                "type_vocab_size": 0, "max_relative_positions": -1,
            },
            ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        ),
        _words(32000), padded_masked_batch, "DeBERTa v3 MLM, 4 layers, 512 wide, 8 heads, V=32000",
    ),
    "t5": Workload(
        _of(
            "T5Config", "T5ForConditionalGeneration",
            {
                "vocab_size": 32000, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 3,
                "num_heads": 8, "use_cache": False, "decoder_start_token_id": 0,
            },
            ("dropout_rate",),
        ),
        _words(32000), _translated_batch, "T5, 3 + 3 layers, 512 wide, 8 heads, V=32000",
    ),
    "t5_base": Workload(
        _of(
            "T5Config", "T5ForConditionalGeneration",
            {
                "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12,
                "num_heads": 12, "use_cache": False, "decoder_start_token_id": 0,
            },
            ("dropout_rate",),
        ),
        _words(32128), _translated_batch, "T5-base, 12 + 12 layers, 768 wide, V=32128",
    ),
    "roberta": Workload(
        _of(
            "RobertaConfig", "RobertaForSequenceClassification",
            {**_ENCODER, "vocab_size": 50265, "max_position_embeddings": 514},
            ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        ),
        _words(50265), _class_batch, "RoBERTa, two classes, 4 layers, 512 wide, 8 heads",
    ),
    "gptj": Workload(  # which writes its attention out
        _of(
            "GPTJConfig", "GPTJForCausalLM",
            {
                "vocab_size": 32000, "n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": 1024,
                "rotary_dim": 32, "use_cache": False,
            },
            ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        ),
        _words(32000), causal_batch, "GPT-J, 4 layers, 512 wide, 8 heads, V=32000",
    ),
    "clip": Workload(
        _clip, _words(49408), _captioned_batch,
        "CLIP, towers of 4 layers, 512 wide, images of 224 x 224 in patches of 16",
    ),
}  # fmt: skip
