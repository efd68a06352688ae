"""A checkpoint's weights are Hugging Face's: `from_pretrained` loads them, and Onward what
`save_pretrained` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from tiny import VOCABULARY, bert, gpt2
from tiny_families import FAMILIES
from torch import nn

import onward
from onward.checkpoint import ModelState, config_files

NAMES = ("T5", "Bart", "Llama", "Mixtral", "ModernBert", "DistilBert")


def of_family(name: str) -> Any:
    config, settings = FAMILIES[name]
    kinds = {
        "T5": "T5ForConditionalGeneration", "Bart": "BartForConditionalGeneration",
        "Llama": "LlamaForCausalLM", "Mixtral": "MixtralForCausalLM",
        "ModernBert": "ModernBertForMaskedLM", "DistilBert": "DistilBertForMaskedLM",
    }  # fmt: skip
    torch.manual_seed(0)
    return getattr(hf, kinds[name])(config(**settings))


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "bert": bert,
    "classifier": lambda: bert(classes=3),
    "untied": lambda: gpt2(tie_word_embeddings=False),
    **{n: (lambda n=n: of_family(n)) for n in NAMES if n in FAMILIES},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), 0.1))
    path = trainer.save(tmp_path)
    found = type(model).from_pretrained(path)
    want = model.state_dict()
    assert found.state_dict().keys() == want.keys()
    assert all(torch.equal(v, want[k]) for k, v in found.state_dict().items())
    tied = {k for k in want if [want[j].data_ptr() for j in want].count(want[k].data_ptr()) > 1}
    for key in tied:  # they are one again
        alike = [j for j in want if want[j].data_ptr() == want[key].data_ptr()]
        assert len({found.state_dict()[j].data_ptr() for j in alike}) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_files_are_those_of_save_pretrained(name: str, tmp_path: Path) -> None:
    """Both have the same tensors by the same names, each once, and the same configuration."""
    model = MODELS[name]()
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), 0.1))
    before = model.config.to_dict()
    path = trainer.save(tmp_path)
    assert model.config.to_dict() == before
    model.save_pretrained(tmp_path / "theirs")
    for text in config_files(model):
        own, theirs = ((p / text).read_text() for p in (path, tmp_path / "theirs"))
        assert json.loads(own) == json.loads(theirs)
    with (
        safe_open(path / "model.safetensors", "pt") as own,
        safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as theirs,
    ):
        assert own.metadata() == theirs.metadata()
        if name != "Mixtral":  # whose experts transformers joins in memory alone
            assert set(own.keys()) == set(theirs.keys())


def test_tied_weights_of_any_model(tmp_path: Path) -> None:
    """A module of the user's own, tied by hand; views of one tensor are stored each."""

    class Tied(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.a = nn.Embedding(VOCABULARY, 8)
            self.b = nn.Linear(8, VOCABULARY, bias=False)
            self.b.weight = self.a.weight
            short = torch.randn(4)
            self.short: torch.Tensor
            self.register_buffer("short", short)
            self.register_buffer("view", short[:2])
            self.register_buffer("also", short)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(ids)).mean() + self.short.sum()

        def get_extra_state(self) -> Any:
            return {"rate": 0.5, "names": ("a", 1)}

        def set_extra_state(self, state: Any) -> None:
            self.restored = state

    model, other = Tied(0), Tied(1)
    found = ModelState.of(model)
    assert found.tied == {"b.weight": "a.weight", "also": "short"}
    trainers = [onward.Trainer(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (model, other)]
    trainers[1].resume(trainers[0].save(tmp_path))
    for key, value in model.state_dict().items():
        own = other.state_dict()[key]
        assert torch.equal(own, value) if isinstance(value, torch.Tensor) else own == value
    assert other.restored == {"rate": 0.5, "names": ("a", 1)}
    assert other.b.weight is other.a.weight


def test_a_module_without_a_config(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    trainer = onward.Trainer(
        layer, torch.optim.SGD(layer.parameters(), 0.1), loss_fn=nn.functional.mse_loss
    )
    names = {path.name for path in trainer.save(tmp_path).iterdir()}
    assert names == {
        "manifest.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json",
    }  # fmt: skip
