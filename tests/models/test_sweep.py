"""A sample of `sweep.py`: families with attention of their own, and some that share one."""

from __future__ import annotations

import pytest
import sweep

# (class, attention, kinds of masks); a batch of "hidden" has a row that sees nothing
SAMPLE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "mpnet": ("MPNetForMaskedLM", "eager", ("square", "hidden")),
    "xglm": ("XGLMForCausalLM", "eager", ("none", "square")),
    "gpt_neo": ("GPTNeoForCausalLM", "eager", ("none", "square")),
    "gpt_neox_japanese": ("GPTNeoXJapaneseForCausalLM", "eager", ("none", "square")),
    "megatron_bert": ("MegatronBertForMaskedLM", "eager", ("right", "hidden")),
    "rembert": ("RemBertForMaskedLM", "eager", ("right",)),
    "albert": ("AlbertForMaskedLM", "sdpa", ("right", "hidden")),
    "electra": ("ElectraForMaskedLM", "eager", ("right", "hidden")),
    "opt": ("OPTForCausalLM", "sdpa", ("left",)),
    "qwen2": ("Qwen2ForCausalLM", "eager", ("left",)),
    "gemma": ("GemmaForCausalLM", "sdpa", ("left",)),
    "pegasus": ("PegasusForConditionalGeneration", "eager", ("hidden",)),
    "mt5": ("MT5ForConditionalGeneration", "eager", ("hidden",)),
    "distilbert": ("DistilBertForMaskedLM", "sdpa", ("square",)),
}


def test_the_sweep_finds_the_families() -> None:
    assert set(SAMPLE) <= set(sweep.families())


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_is_eagers_equal(family: str) -> None:
    name, attention, masks = SAMPLE[family]
    cls = next(c for c in sweep.classes_of(family) if c.__name__ == name)
    found = sweep.outcome(cls, attention, masks)
    assert found
    assert set(found.values()) == {"equal"}, found
