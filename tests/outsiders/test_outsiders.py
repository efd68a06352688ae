"""What runs outsiders' suites: a sample of it, and that it notices what differs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import optimizers
import shapes
import table
from scripts import SCRIPTS, Ran, Script, changed, difference, folder_of, row, run
from trainer_tests import differences, files_of, outcomes

WRITTEN = table.read()
PROGRAM = """
import argparse

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)
import transformers


def main():
    parser = HfArgumentParser(TrainingArguments)
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--train_file")
    parser.add_argument("--block_size", type=int)
    args, own = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    with open(own.train_file) as file:
        ids = tokenizer(file.read().splitlines(), truncation=True, max_length=16)["input_ids"]
    rows = [{"input_ids": x, "labels": x} for x in ids if len(x) == 16]
    model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path)
    trainer = Trainer(model, args, train_dataset=rows)
    print(trainer.__class__.__module__, file=open("made.txt", "w"))
    trainer.train()


if __name__ == "__main__":
    main()
"""
TESTS = """
import unittest

from transformers import Trainer, TrainingArguments, nothing_of_that_name
from transformers.testing_utils import require_nothing_of_that_name

import torch


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, input_x, labels):
        return ((self.a * input_x - labels) ** 2).mean(),


class Tests(unittest.TestCase):
    def test_it_trains(self):
        rows = [{"input_x": float(i), "labels": 2.0 * i} for i in range(8)]
        args = TrainingArguments(
            "out", use_cpu=True, max_steps=2, report_to="none", save_strategy="no",
        )
        model = Line()
        Trainer(model, args, train_dataset=rows).train()
        assert float(model.a) != 1.0

    def test_it_is_transformers_own(self):
        assert Trainer.__module__ == "transformers.trainer"

    def test_it_fails(self):
        raise AssertionError

    @require_nothing_of_that_name
    def test_it_is_left_out(self):
        raise AssertionError
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_script_of_that_shape_logs_the_same(name: str) -> None:
    stock, ours = (shapes.run(name, side, 4) for side in (False, True))
    found = {name: text} if (text := difference(stock, ours)) else {}
    assert len(stock.steps) == 4
    assert not table.complaints("shapes", found, [name], WRITTEN["shapes"])


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["AdamW[", "Adam[", "SGD[", "RMSprop[", "Muon["])
def test_settings_of_torchs_own_optimizers(kind: str) -> None:
    found, ran = optimizers.differences(kind)
    assert bool(ran) == (kind != "Muon[")
    assert not table.complaints("optimizers", found, ran, WRITTEN["optimizers"])


def test_what_differs_is_a_complaint_and_what_is_gone_too() -> None:
    found, written = {"a": "why", "b": "why"}, {"b": "known", "c": "known", "d": "known", "e": " "}
    said = table.complaints("side", found, ["a", "b", "c"], written)
    assert len(said) == 3
    assert "a differs: why; fix: mend it" in said[0]
    assert "c differs no longer; fix: take it out" in said[1]
    assert "e has no reason" in said[2]


def test_one_line_of_a_script_changes() -> None:
    text = changed(PROGRAM)
    assert "from onward.integrations.transformers import Trainer\n" in text
    assert "AutoTokenizer, HfArgumentParser, TrainingArguments)" in text
    assert "import transformers\n" in text
    assert text.partition("def main")[2] == PROGRAM.partition("def main")[2]
    assert changed("from transformers import Seq2SeqTrainer, x\n") == (
        "from transformers import (x)\n"
        "from onward.integrations.transformers import Seq2SeqTrainer\n"
    )
    assert changed("from transformers import a, b\n") == "from transformers import a, b\n"


def test_logs_that_differ_are_told() -> None:
    def ran(*losses: float) -> Ran:
        return Ran([{"loss": x, "step": i + 1} for i, x in enumerate(losses)], [0.5, 1.0])

    assert difference(ran(1.0, 2.0), ran(1.0, 2.0)) == ""
    assert difference(ran(1.0, 2.0), ran(1.0, 2.00001)) == "step 2: loss 2.00001, stock 2.0"
    assert difference(ran(1.0, 2.0), ran(1.0)) == "1 lines of log, stock has 2"
    assert difference(ran(1.0), Ran(failed="why")) == "fails: why"
    assert row("run", ran(1.0), ran(1.0)) == "| run | 0.50 | 1.00 | 0.50 | 1.00 |"


@pytest.mark.slow
def test_a_script_runs_on_both_sides(tmp_path: Path) -> None:
    """A program in the place of the one that a tester would have."""
    folder = tmp_path / "examples" / "pytorch"
    (folder / "language-modeling").mkdir(parents=True)
    (folder / SCRIPTS["run_clm"].path).write_text(PROGRAM)
    script = Script("language-modeling/run_clm.py", "gpt2", "text", ("--max_steps", "3"))
    found = [run(script, folder_of(tmp_path), side, tmp_path) for side in ("stock", "drop-in")]
    assert not found[0].failed
    assert len(found[0].steps) == len(found[1].steps) == 3
    assert difference(found[0], found[1]) == ""
    assert (tmp_path / "made.txt").read_text() == "onward.integrations.transformers\n"


@pytest.mark.slow
def test_tests_of_a_checkout_run_on_each_side(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "trainer"
    folder.mkdir(parents=True)
    (folder / "test_trainer.py").write_text(TESTS)
    (file,) = files_of(tmp_path)
    stock, ours = (outcomes(file, side) for side in ("stock", "drop-in"))
    name = "tests/trainer/test_trainer.py::Tests::test_it_"
    assert {t.removeprefix(name): outcome for t, (outcome, _) in stock.items()} == {
        "trains": "passed", "is_transformers_own": "passed", "fails": "failed",
        "is_left_out": "skipped",
    }  # fmt: skip
    found = differences(stock, ours)
    assert list(found) == [f"{name}is_transformers_own"]
    assert found[f"{name}is_transformers_own"].startswith("failed: AssertionError")


@pytest.mark.parametrize("find", [folder_of, files_of])
def test_a_folder_of_something_else_is_refused(find: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no .*; fix: --"):
        find(tmp_path)  # type: ignore[operator]
