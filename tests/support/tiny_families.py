"""One tiny model of each family with a batch, and the law of same numbers for a few batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tiny
import torch
import transformers as hf
from tiny import VOCABULARY, Tensors, batch, eager, tokens

from onward.train.verify import allowed_difference

Make = Callable[[], torch.nn.Module]
Data = Callable[[], Tensors]

BERT = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2,
    "num_decoder_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0,
    "use_cache": False, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 64, "dropout": 0.0, "use_cache": False,
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 64, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SMALL_HEADS = {**LLAMA, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
MODERNBERT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    "local_attention": 4, "global_attn_every_n_layers": 2, "bos_token_id": 0, "eos_token_id": 0,
    "cls_token_id": 0, "sep_token_id": 0,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": VOCABULARY, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 32,
    "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}  # fmt: skip
LLAMA4 = {
    **SMALL_HEADS, "intermediate_size_mlp": 32, "num_hidden_layers": 2, "num_local_experts": 2,
    "num_experts_per_tok": 1, "moe_layers": [1],
}  # fmt: skip
FNET = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
}  # fmt: skip
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "T5": (hf.T5Config, T5), "Bart": (hf.BartConfig, BART), "Llama": (hf.LlamaConfig, LLAMA),
    "Llama4": (hf.Llama4TextConfig, LLAMA4), "FNet": (hf.FNetConfig, FNET),
    "Mistral": (hf.MistralConfig, LLAMA), "Qwen3": (hf.Qwen3Config, SMALL_HEADS),
    "Gemma2": (hf.Gemma2Config, SMALL_HEADS), "Cohere": (hf.CohereConfig, LLAMA),
    "Glm": (hf.GlmConfig, SMALL_HEADS), "ModernBert": (hf.ModernBertConfig, MODERNBERT),
    "GPTNeoX": (hf.GPTNeoXConfig, LLAMA), "DistilBert": (hf.DistilBertConfig, DISTILBERT),
    "Bert": (hf.BertConfig, BERT), "Roberta": (hf.RobertaConfig, BERT),
}  # fmt: skip


def of(family: str, task: str, **more: Any) -> Make:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        config, settings = FAMILIES[family]
        return tiny.ready(getattr(hf, f"{family}For{task}")(config(**{**settings, **more})))

    return make


def padded(**more: torch.Tensor) -> Tensors:
    """Padding at the right; `more` replaces the labels."""
    data = batch(4, 12, "right")
    if more:
        del data["labels"]
    return {**data, **more}


def summaries(**more: torch.Tensor) -> Tensors:
    """Labels of another length than the inputs', the last of some ignored."""
    labels = tokens(4, 7, seed=3)
    labels[1, 4:] = labels[2, 6:] = -100
    return {**padded(labels=labels), **more}


def answers() -> Tensors:
    """Starts and ends; those behind the last token are ignored."""
    return padded(
        start_positions=torch.tensor([0, 3, 12, 20]), end_positions=torch.tensor([2, 5, 40, 20])
    )


def choices() -> Tensors:
    ids = torch.stack([tokens(4, 12, seed) for seed in (1, 2, 3)], 1)
    mask = torch.ones_like(ids)
    mask[1, :, 9:] = mask[2, 1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 1])}


def named() -> Tensors:
    data = padded()
    ignored = data["labels"] == -100
    return {**data, "labels": (data["labels"] % 3).masked_fill(ignored, -100)}


def masked(dims: int, kind: str) -> Tensors:
    """BERT's mask as the user's own: padding, and no token looks further ahead than three."""
    data = padded()
    rows = data["attention_mask"][:, None, :]
    mask = (rows * torch.ones(12, 12)).tril(3)
    mask = mask[:, None] if dims == 4 else mask
    least = torch.finfo(torch.float32).min
    kinds = {
        "int": mask.long(), "bool": mask.bool(),
        "float": torch.zeros_like(mask).masked_fill(mask == 0, least),
    }  # fmt: skip
    return {**data, "attention_mask": kinds[kind], "labels": padded()["labels"]}


def packed() -> Tensors:
    """Several documents in a row: their positions start again."""
    positions = torch.arange(12).repeat(4, 1)
    positions[0, 5:] -= 5
    positions[1, 3:] -= 3
    positions[1, 8:] -= 5
    return {**batch(4, 12), "position_ids": positions}


class Towers(torch.nn.Module):
    """Two encoders, the mean of real tokens made a unit vector: its own passage is a query's label.

    Labels come with the batch: `arange(len(scores))` would fix the batch's size.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = hf.BertConfig(**BERT)
        self.query = hf.BertModel(config, add_pooling_layer=False)
        self.passage = hf.BertModel(config, add_pooling_layer=False)

    def forward(self, labels: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        vectors = []
        for name in ("query", "passage"):
            mask = batch[f"{name}_mask"]
            tower = self.get_submodule(name)
            hidden = tower(input_ids=batch[f"{name}_ids"], attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * weights).sum(1) / weights.sum(1)
            vectors.append(torch.nn.functional.normalize(mean, dim=-1))
        return torch.nn.functional.cross_entropy(vectors[0] @ vectors[1].t() / 0.05, labels)


def pairs(seed: int) -> Tensors:
    data: Tensors = {"labels": torch.arange(4)}
    for name, length in (("query", 5), ("passage", 12)):
        given = batch(4, length, "right", seed=100 * seed + length)
        data |= {f"{name}_ids": given["input_ids"], f"{name}_mask": given["attention_mask"]}
    return data


SPOKEN = (torch.arange(7) < torch.tensor([[7], [4], [6], [7]])).long()
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
SIGNS = torch.tensor([0, 1, 1, 0])
CASES: dict[str, tuple[Make, Data]] = {
    "T5": (of("T5", "ConditionalGeneration"), summaries),
    "T5 with both masks": (
        of("T5", "ConditionalGeneration", feed_forward_proj="gated-gelu"),
        lambda: summaries(decoder_attention_mask=SPOKEN),
    ),
    "Bart": (of("Bart", "ConditionalGeneration"), summaries),
    "Llama": (of("Llama", "CausalLM", num_hidden_layers=2), padded),
    "Llama, two heads a key": (of("Llama", "CausalLM", num_key_value_heads=2), padded),
    "Llama 4, turned as complex numbers": (of("Llama4", "CausalLM"), padded),
    "FNet, Fourier transforms": (
        of("FNet", "MaskedLM"),
        lambda: {k: v for k, v in padded().items() if k != "attention_mask"},
    ),
    "Qwen3, norms of heads": (of("Qwen3", "CausalLM"), padded),
    "Gemma 2, soft caps": (of("Gemma2", "CausalLM", sliding_window=4), lambda: batch(4, 12)),
    "Cohere, neighbours turned": (of("Cohere", "CausalLM", num_key_value_heads=2), padded),
    "GLM, half of a head by neighbours": (of("Glm", "CausalLM"), padded),
    "ModernBERT, a gate of one product": (of("ModernBert", "MaskedLM"), padded),
    "Llama, packed documents": (of("Llama", "CausalLM"), packed),
    "GPT-2, packed documents": (lambda: tiny.gpt2(0.0, layers=1, use_cache=False), packed),
    "GPT-2, positions and its cache on": (lambda: tiny.gpt2(0.0, layers=1), packed),
    "Mistral, sliding window": (
        of("Mistral", "CausalLM", sliding_window=4, num_key_value_heads=4),
        padded,
    ),
    "GPT-NeoX, half of a head turned": (of("GPTNeoX", "CausalLM", rope_parameters=HALF), padded),
    "DistilBERT, class": (of("DistilBert", "SequenceClassification"), lambda: padded(labels=SIGNS)),
    "RoBERTa, names": (of("Roberta", "TokenClassification", num_labels=3), named),
    "BERT, answers": (of("Bert", "QuestionAnswering"), answers),
    "BERT, pretraining": (
        of("Bert", "PreTraining"),
        lambda: {**padded(), "next_sentence_label": SIGNS},
    ),
    "BERT, next sentence": (of("Bert", "NextSentencePrediction"), lambda: padded(labels=SIGNS)),
    "BERT, choices": (of("Bert", "MultipleChoice"), choices),
    "BERT, mask of bools": (of("Bert", "MaskedLM"), lambda: masked(4, "bool")),
    "BERT, mask added": (of("Bert", "MaskedLM"), lambda: masked(4, "float")),
}


def assert_same(ours: Sequence[Tensors], model: torch.nn.Module, data: Sequence[Tensors]) -> None:
    """Distances and what is allowed are root mean squares over the batches."""
    exact, plain = ([eager(model, d, t) for d in data] for t in (torch.float64, torch.float32))
    assert all(set(own) == set(truth) for own, truth in zip(ours, exact, strict=True))
    broken = []
    for name in exact[0]:
        distances, bounds = [], []
        for own, truth, other in zip(ours, exact, plain, strict=True):
            distances.append(float((own[name].double() - truth[name]).norm()))
            bounds.append(allowed(other[name], truth[name], truth))
        if not rms(distances) <= rms(bounds):
            broken.append(f"{name}: {rms(distances):.2e}, allowed {rms(bounds):.2e}")
    assert not broken, "\n".join(broken)


def allowed(other: torch.Tensor, truth: torch.Tensor, whole: Tensors) -> float:
    """The law; what is zero, as the gradient of a key's bias, which softmax does not see, is noise
    in any engine."""
    noise = 6e-8 * math.hypot(*(float(t.norm()) for t in whole.values()))
    norm = float(truth.norm())
    return noise if norm <= 1e-7 * noise else max(allowed_difference(other, truth), 1e-6 * norm)


def rms(numbers: Sequence[float]) -> float:
    return math.sqrt(sum(x * x for x in numbers) / len(numbers))
