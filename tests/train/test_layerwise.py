"""`onward.optim.layerwise_decay` beside groups made by hand, for the names of four families."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import batch, bert, gpt2, mlp
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import onward
from onward import OnwardError

LR, DECAY = 0.1, 0.5
SMALL: dict[str, Any] = {"vocab_size": 31, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(hidden_size=8, intermediate_size=8, **SMALL))


def t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "vocab_size": 31}
    return T5ForConditionalGeneration(T5Config(num_layers=3, num_decoder_layers=2, **sizes))


# the number of steps below the top, by the beginning of a path; the first that fits counts
FAMILIES: dict[str, tuple[Any, dict[str, int]]] = {
    "bert": (lambda: bert(layers=2), {
        "bert.embeddings.": 3, "bert.encoder.layer.0.": 2, "bert.encoder.layer.1.": 1, "cls.": 0,
    }),
    "classifier": (lambda: bert(layers=2, classes=3), {
        "bert.embeddings.": 3, "bert.encoder.layer.0.": 2, "bert.encoder.layer.1.": 1,
        "bert.pooler.": 0, "classifier.": 0,
    }),
    "gpt2": (lambda: gpt2(layers=3), {
        "transformer.wte.": 4, "transformer.wpe.": 4, "transformer.h.0.": 3, "transformer.h.1.": 2,
        "transformer.h.2.": 1, "transformer.ln_f.": 0,
    }),
    "llama": (llama, {
        "model.embed_tokens.": 3, "model.layers.0.": 2, "model.layers.1.": 1, "model.norm.": 0,
        "lm_head.": 0,
    }),
    "t5": (t5, {
        "shared.": 4, "encoder.block.0.": 3, "encoder.block.1.": 2, "encoder.block.2.": 1,
        "encoder.final": 0, "decoder.block.0.": 2, "decoder.block.1.": 1, "decoder.final": 0,
        "lm_head.": 0,
    }),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_rates_of_a_family(family: str) -> None:
    make, steps = FAMILIES[family]
    model = make()
    groups = onward.optim.layerwise_decay(model, LR, DECAY)
    rates = {p: g["lr"] for g in groups for p in g["params"]}
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    for path, p in model.named_parameters():
        n = next(n for start, n in steps.items() if path.startswith(start))
        assert rates[p] == pytest.approx(LR * DECAY**n), path
    assert [g["lr"] for g in groups] == sorted(g["lr"] for g in groups)


def test_a_trainer_takes_them() -> None:
    model = gpt2(0.0)
    twin, data = copy.deepcopy(model), batch(2, 7)
    sgd = torch.optim.SGD(onward.optim.layerwise_decay(model, LR, DECAY))
    trainer: Any = onward.Trainer(model, sgd)
    trainer.train_step(**data)
    twin(**data).loss.backward()
    made = [([p for n, p in twin.named_parameters() if n.startswith(start)], LR * DECAY**n)
            for start, n in {"transformer.w": 3, "transformer.h.0": 2, "transformer.h.1": 1,
                             "transformer.ln_f": 0}.items()]  # fmt: skip
    torch.optim.SGD([{"params": params, "lr": rate} for params, rate in made], lr=LR).step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-6)


def test_other_names_and_refusals() -> None:
    with pytest.raises(OnwardError, match=r"no parameter of Mlp is in a block .*; fix: pattern="):
        onward.optim.layerwise_decay(mlp(), LR, DECAY)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = onward.optim.layerwise_decay(net, LR, DECAY, r"(?P<stack>)(?P<index>\d+)\.")
    assert [g["lr"] for g in groups] == [LR * 0.25, LR * 0.5]
    for wrong in (0, -1.0, 1.5, True, "0.5", None):
        with pytest.raises(OnwardError, match=r"decay=.*fix:"):
            onward.optim.layerwise_decay(net, LR, wrong)  # type: ignore[arg-type]
