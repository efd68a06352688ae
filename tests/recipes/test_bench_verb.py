"""`onward bench`: the losses of its engines beside a loop by hand, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.cli import main
from onward.recipes import bench as recipe
from onward.recipes.bench import EngineProcessError, table
from onward.recipes.bench_options import BENCH_ENGINES
from onward.recipes.bench_worker import BenchSession, BenchWorker, loss_of, model_and_batches

MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.drop = torch.nn.Dropout(p)
    def forward(self, x, y):
        hidden = self.drop(torch.relu(self.first(x)))
        return torch.nn.functional.cross_entropy(self.last(hidden), y)

def make(p=0.0):
    torch.manual_seed(3)
    return Model(p), {"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))}

def masked():
    return make(0.3)

def lossless():
    return torch.nn.Linear(2, 2), torch.zeros(3, 2)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path / 'model.py'}:make"


class Here:
    """An engine's process that is none: its messages are answered in this one."""

    dies: frozenset[str] = frozenset()

    def __init__(self, name: str) -> None:
        self.name, self.worker = name, BenchWorker()

    def ask(self, name: str, *arguments: Any) -> dict[str, Any]:
        if self.name in self.dies and name == "run":
            raise EngineProcessError("its process ended (signal 9)")
        try:
            return getattr(self.worker, name)(*json.loads(json.dumps(arguments)))
        except Exception as error:
            raise EngineProcessError(str(error)) from error

    def close(self) -> None: ...


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "EngineProcess", Here)
    monkeypatch.setattr(recipe, "_PAUSE", 0.0)
    monkeypatch.setattr("onward.recipes.bench_worker._IMPORTED", ())


WORDS = ["--engines", "eager", "eager-tuned", "onward", "--steps", "2", "--rounds", "2"]


def test_every_engine_has_the_losses_of_a_loop_by_hand(
    target: str, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", target, *WORDS, "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    model, calls = model_and_batches(target, (None, None), 7)
    optimizer, want = torch.optim.AdamW(model.parameters(), lr=5e-5), []
    for _, batch in calls:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        want.append(loss.item())
    assert [each["engine"] for each in case["engines"]] == ["eager", "eager-tuned", "onward"]
    for each in case["engines"]:
        assert each["losses"] == pytest.approx(want, rel=1e-5) and each["same"]
        assert [len(seconds) for seconds in each["rounds"]] == [2, 2]
        assert "exact_losses" not in each, "nothing is random"
    assert len({b["x"].numpy().tobytes() for _, b in calls}) == 6, (
        "rows turn: six rows, six batches"
    )


def test_masks_are_left_out_where_losses_are_compared(
    target: str, here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masked = target.replace("make", "masked")
    folder = tmp_path / "out"
    assert main(["bench", masked, *WORDS, "--output_dir", str(folder), "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    plain = [BenchSession(BENCH_ENGINES["eager"], "fp32", target, (None, None), 3)]
    want = plain[0].timed(0, 3)["losses"]
    for each in case["engines"]:
        assert each["exact_losses"] == pytest.approx(want, rel=1e-5)
        assert each["losses"][:3] != pytest.approx(want, rel=1e-5)
    assert json.loads((folder / "bench.json").read_text())["cases"] == [case]
    assert main(["bench", masked, *WORDS, "--output_dir", str(folder)]) == 2
    assert "is no empty folder, in --output_dir" in capsys.readouterr().err


def test_an_engine_that_fails_is_a_line_of_the_table(
    target: str, here: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Here, "dies", frozenset({"eager"}))
    assert main(["bench", target, *WORDS]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["fp32", "ms/step"]
    assert [line.split()[0] for line in lines[1:]] == ["eager", "eager-tuned", "onward"]
    assert lines[1].endswith("its process ended (signal 9)")
    assert "1.00x" in lines[2] and lines[2].endswith(" -"), "the first that ran is the measure"
    assert main(["bench", target.replace("make", "lossless"), *WORDS]) == 1
    told = capsys.readouterr().out
    assert told.count("the model returns no loss but a Tensor") == 2


def test_losses_that_differ_are_said() -> None:
    engine = {"step_s": 0.2, "round_s": [0.1, 0.3], "step_bytes": 3 << 20, "first_step_s": 1.0}
    pair: list[dict[str, Any]] = [
        {"engine": "eager", "losses": [2.0, 1.0], **engine},
        {"engine": "onward", "losses": [2.0, 1.1], **engine, "step_s": 0.1},
    ]
    recipe._compare(pair, 1e-3)
    assert [each["same"] for each in pair] == [True, False]
    assert pair[1]["loss_difference"] == pytest.approx(0.1)
    last = table({"precision": "fp32", "engines": pair}).splitlines()[-1]
    assert last.split()[1:] == [
        "100.0", "100.0", "to", "300.0", "2.00x", "3", "1.00", "1e-01", "TOO", "FAR",
    ]  # fmt: skip
    pair[1]["losses"] = [2.0, float("nan")]
    recipe._compare(pair, 1e-3)
    assert not pair[1]["same"] and pair[1]["loss_difference"] is None


def test_batches_of_a_model_by_name_differ_and_its_dropout_can_be_left_out() -> None:
    session = BenchSession(BENCH_ENGINES["eager"], "fp32", "gpt2-tiny", (2, 8), 3)
    assert session.random
    ids = [kwargs["input_ids"] for _, kwargs in session.batches]
    assert all(each.shape == (2, 8) for each in ids) and not torch.equal(ids[1], ids[2])
    plain = BenchSession(BENCH_ENGINES["eager"], "fp32", "gpt2-tiny", (2, 8), 1, dropout=False)
    assert not plain.random
    (args, kwargs) = plain.batches[0]
    losses = [loss_of(plain.model(*args, **kwargs)).item() for _ in range(2)]
    assert losses[0] == losses[1], "in training mode"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no model or script is given"),
        (["gpt2-tiny", "--engines", "eagr"], "engines has 'eagr', in --engines; fix: did you mean"),
        (["gpt2-tiny", "--precision", "fp8"], "precision has 'fp8', in --precision; fix: "),
        (["gpt2-tiny", "--steps", "0"], "steps is 0, in --steps; fix: give 1 or more"),
        (
            ["m.py:make", "--batch_size", "3"],
            "batch_size has no effect: the function returns the batch, in --batch_size",
        ),
        (["train.py"], "bench does not run scripts, as MODEL_OR_SCRIPT; fix: name a"),
        (["gpt2-tiny", "--engine", "eager"], "did you mean --engines?"),
    ],
)
def test_refusals(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
