"""Captures of transformers' models that a run before has kept, in each way to train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept_program
import pytest
import tiny
import torch
from exports import Exports, exports
from kept_runs import cache, folder
from torch import nn

import onward

__all__ = ["cache", "exports", "folder"]  # fixtures


def attention(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
    scores = (q @ k.transpose(2, 3) * 0.25).tril()
    return (scores @ v).transpose(1, 2).contiguous(), None


def _registered(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers import AttentionInterface

    patch.setitem(AttentionInterface._global_mapping, "sdpa", attention)


def _activation(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers.activations import NewGELUActivation

    patch.setattr(NewGELUActivation, "forward", lambda self, x: torch.tanh(x))


def _layer(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers.pytorch_utils import Conv1D

    plain = Conv1D.forward
    patch.setattr(Conv1D, "forward", lambda self, x: plain(self, x) * 0.5)


def _eager(patch: pytest.MonkeyPatch, model: Any) -> None:
    model.set_attn_implementation("eager")


def _eager_patched(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    _eager(patch, model)
    patch.setattr(modeling_gpt2, "eager_attention_forward", attention)


def _mask(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    patch.setattr(modeling_gpt2, "create_causal_mask", lambda *args, **kwargs: None)


def _loss(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers.loss import loss_utils

    plain = loss_utils.LOSS_MAPPING["ForCausalLM"]
    other = lambda *args, **kwargs: plain(*args, **kwargs) * 2  # noqa: E731
    patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", other)


def _untied(patch: pytest.MonkeyPatch, model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _setting(patch: pytest.MonkeyPatch, model: Any) -> None:
    model.config.output_hidden_states = True


def _scale(patch: pytest.MonkeyPatch, model: Any) -> None:
    for block in model.transformer.h:
        block.attn.scale_attn_weights = False


def _dropout(patch: pytest.MonkeyPatch, model: Any) -> None:
    model.transformer.drop.p = 0.5


def _functional(patch: pytest.MonkeyPatch, model: Any) -> None:
    patch.setattr(nn.functional, "cross_entropy", lambda x, labels, **more: x.square().mean())


OF_TRANSFORMERS: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "an attention that is registered": _registered, "an activation": _activation,
    "a layer": _layer, "the attention that is asked for": _eager, "its function": _eager_patched,
    "a mask's function": _mask, "a loss that is registered": _loss, "a tie": _untied,
    "a setting": _setting, "an attribute of a layer": _scale, "a rate": _dropout,
    "a function of torch's": _functional,
}  # fmt: skip


def two_losses(model: Any, batch: Any, ours: bool) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if ours:
        trainer = onward.Trainer(model, optimizer)
        return [float(trainer.train_step(**batch).loss) for _ in range(2)]
    found = []
    for _ in range(2):
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.fixture
def kept_gpt2(folder: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A batch, and GPT-2 of which a run before has kept the capture."""
    monkeypatch.setenv("ONWARD_CACHE", str(folder / "cache"))
    batch = tiny.batch(2, 8, padding="right")
    two_losses(tiny.gpt2(dropout=0.0), batch, ours=True)
    if exports.taken():
        two_losses(tiny.gpt2(dropout=0.0), batch, ours=True)
    assert exports.taken() == 0
    return batch


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_what_is_another_in_transformers_is_captured_again(
    name: str, kept_gpt2: Any, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for ours in (True, False):
        model = tiny.gpt2(dropout=0.0)
        with monkeypatch.context() as patch:
            OF_TRANSFORMERS[name](patch, model)
            results.append(two_losses(model, kept_gpt2, ours))
    if name != "a rate":  # whose masks are others than eager's
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    assert exports.taken() == 1


def test_what_a_forward_sets_once_is_set_where_its_capture_is_read(exports: Exports) -> None:
    labels = {
        "single_label_classification": torch.arange(4) % 3,
        "multi_label_classification": torch.ones(4, 3),
    }
    for expected in (1, 0):
        for kind, given in labels.items():
            batch = {**tiny.batch(4, 8), "labels": given}
            model: Any = tiny.bert(dropout=0.0, classes=3)
            assert model.config.problem_type is None
            ours = two_losses(model, batch, ours=True)
            assert exports.taken() == expected
            assert model.config.problem_type == kind
            assert vars(model.config)["problem_type"] == kind
            eager = tiny.bert(dropout=0.0, classes=3)
            optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
            want = []
            for _ in range(2):
                loss = eager(**batch).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                want.append(float(loss.detach()))
            torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)
            model = tiny.bert(dropout=0.0, classes=3)  # where it is set before, nothing is
            model.config.problem_type = kind
            two_losses(model, batch, ours=True)
            assert exports.taken() == expected


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", kept_program.RUNS)
def test_each_way_to_train_reads_what_it_has_captured(name: str, exports: Exports) -> None:
    found = []
    for expected in (1, 0):
        torch.manual_seed(0)
        found.append(kept_program.RUNS[name]())
        assert exports.taken() == expected
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_second_process_reads_all_that_the_first_has_captured(tmp_path: Path) -> None:
    names = ["gpt2", "bert", "the Trainer in its place"]
    first, second = (_process(PROGRAM, *names, cache=tmp_path) for _ in range(2))
    assert {name: count for name, (_, count, _) in first.items()} == dict.fromkeys(names, 1)
    assert {name: count for name, (_, count, _) in second.items()} == dict.fromkeys(names, 0)
    assert {n: x[0] for n, x in first.items()} == {n: x[0] for n, x in second.items()}


OWN = """
import json, sys, torch, onward
with open(sys.argv[1]) as file:
    SCALE = json.load(file)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.names = {"one": 1.0, "two": 2.0}
    def forward(self, x):
        for name in self.names:
            x = self.layer(x) * SCALE * self.names[name]
        return (x ** 2).mean()
count, real = [0], torch.export.export
def counted(*args, **kwargs):
    count[0] += 1
    return real(*args, **kwargs)
torch.export.export = counted
torch.manual_seed(0)
model = Model()
eager = float(model(torch.ones(3, 4)).detach())
trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
print(json.dumps([eager, float(trainer.train_step(torch.ones(3, 4)).loss), count[0]]))
"""


@pytest.mark.slow
def test_a_second_process_of_a_program_whose_file_says_something_else(tmp_path: Path) -> None:
    program, data = tmp_path / "own.py", tmp_path / "scale.json"
    program.write_text(OWN)
    os.utime(program, (1000, 1000))
    for scale, expected in ((1.0, 1), (2.0, 1)):
        data.write_text(json.dumps(scale))
        eager, ours, count = _process(program, str(data), cache=tmp_path)
        assert ours == pytest.approx(eager, rel=1e-5)
        assert count == expected


PROGRAM = Path(__file__).with_name("kept_program.py")


def _process(program: Path, *arguments: str, cache: Path) -> Any:
    variables = {
        **{k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "ONWARD_CACHE": str(cache / "cache"), "ONWARD_GRAPH_CACHE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    variables.pop("PYTHONHASHSEED", None)
    ran = subprocess.run(
        [sys.executable, str(program), *arguments], env=variables, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])
