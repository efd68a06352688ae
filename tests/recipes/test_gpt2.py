"""The sizes are the published ones."""

from __future__ import annotations

import pytest
import torch

from onward.recipes.gpt2 import PRESETS, gpt2_config


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2-tiny", 2.76), ("gpt2-small", 124.44), ("gpt2-medium", 354.82)]
)
def test_parameter_counts(name: str, millions: float) -> None:
    from transformers import AutoModelForCausalLM

    config = gpt2_config(name, PRESETS[name].vocab_size, 0)
    assert config.max_position_embeddings == PRESETS[name].positions
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)
