"""RankSizes of models against transformers' own, and FLOPs against Megatron's formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from onward.errors import OnwardError
from onward.simulate import PRESETS, Transformer


def real(name: str) -> Any:
    """transformers' model of a preset's sizes, without memory."""
    model = PRESETS[name]
    if name == "bert-large":
        config = BertConfig(
            hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
        )
        return BertForMaskedLM, config
    if name.startswith("llama"):
        config = LlamaConfig(
            hidden_size=model.hidden, num_hidden_layers=model.layers, vocab_size=model.vocab,
            num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
            intermediate_size=model.ffn, tie_word_embeddings=False,
        )  # fmt: skip
        return LlamaForCausalLM, config
    return GPT2LMHeadModel, GPT2Config(
        n_embd=model.hidden, n_layer=model.layers, n_head=model.heads, n_positions=model.positions
    )


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    kind, config = real(name)
    # layers are alike: two of them, and one, say what the others add
    counts = []
    for layers in (1, 2):
        config.num_hidden_layers = layers
        with torch.device("meta"):
            counts.append(sum(p.numel() for p in kind(config).parameters()))
    expected = counts[0] + (PRESETS[name].layers - 1) * (counts[1] - counts[0])
    assert PRESETS[name].parameters == expected


@pytest.mark.parametrize(("h", "layers", "v", "s"), [(2304, 24, 51200, 2048), (128, 2, 100, 64)])
def test_flops_are_megatrons(h: int, layers: int, v: int, s: int) -> None:
    """Narayanan et al. (2021), equation 3: with recomputation; without it 72 and V / 12 l h."""
    model, batch = Transformer(h, layers, 8, v), 3
    full = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert model.step_flops(batch, s, recompute=True) == pytest.approx(full, rel=1e-12)
    plain = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model.step_flops(batch, s) == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1, 1, 1), (10, 1, 3, 5, 3), (8, 1, 4, 5, 3)], ids=["zero", "heads", "keys"]
)
def test_sizes_that_cannot_be(sizes: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(OnwardError, match="; fix: "):
        Transformer(*sizes)
