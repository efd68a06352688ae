"""The sizes are the published ones, and each family's special tokens are its tokenizer's."""

from __future__ import annotations

import pytest
import torch

from onward.recipes.presets import PRESETS, default_model, preset_config
from onward.recipes.tasks import TASKS
from onward.recipes.trained_tokenizer import trained_tokenizer

MILLIONS = {
    "gpt2-tiny": 2.76, "gpt2-small": 124.44, "gpt2-medium": 354.82, "gpt2-large": 774.03,
    "gpt2-xl": 1557.61, "bert-base": 109.48, "bert-large": 335.14,
}  # fmt: skip


@pytest.mark.parametrize("name", MILLIONS)
def test_parameter_counts(name: str) -> None:
    from transformers import AutoModel

    config = preset_config(name, PRESETS[name].vocab_size)
    assert config.max_position_embeddings == PRESETS[name].positions
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(MILLIONS[name], abs=0.005)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "roberta", "t5", "whisper"])
def test_text_comes_back_from_a_trained_tokenizer(family: str, text: str) -> None:
    tokenizer = trained_tokenizer([text], 600, 64, family)  # type: ignore[arg-type]
    assert len(tokenizer) <= 600 and tokenizer.model_max_length == 64
    words = "def format_help ( self ) :"
    kept = str(tokenizer.decode(tokenizer(words)["input_ids"], skip_special_tokens=True))
    assert kept.replace(" ", "") == words.replace(" ", "")
    ends = {
        "gpt2": (None, None), "llama": (None, None), "bert": ("cls_token_id", "sep_token_id"),
        "roberta": ("bos_token_id", "eos_token_id"), "t5": (None, "eos_token_id"),
        "whisper": (None, "eos_token_id"),
    }  # fmt: skip
    first, last = ends[family]
    ids = tokenizer("a", "b")["input_ids"]
    assert first is None or ids[0] == getattr(tokenizer, first)
    assert last is None or ids[-1] == getattr(tokenizer, last)
    assert ("token_type_ids" in tokenizer("a", "b")) == (family == "bert")


@pytest.mark.parametrize("name", PRESETS)
def test_special_tokens_of_a_configuration_are_the_tokenizers(name: str, text: str) -> None:
    preset = PRESETS[name]
    if preset.family == "vit":  # has no tokens
        return
    tokenizer = trained_tokenizer([text], 500, 64, preset.family)
    config = preset_config(name, len(tokenizer), tokenizer)
    if tokenizer.pad_token_id is not None:
        assert config.pad_token_id == tokenizer.pad_token_id
    if preset.family != "bert" and tokenizer.eos_token_id is not None:
        assert config.eos_token_id == tokenizer.eos_token_id


def test_every_task_has_a_model_by_default() -> None:
    for name, task in TASKS.items():
        preset = default_model(name)
        assert task.preset == preset
        assert task.fits(preset_config(preset, PRESETS[preset].vocab_size))
