"""docs/quickstart.md: its programs run and learn, its command lines are read as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from onward import cli
from onward.module import accelerated

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "quickstart.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
LINES = [
    line
    for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the page's programs leave behind, run in their order."""
    found: dict[str, Any] = {"__name__": "quickstart"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("quickstart"))
        for i, program in enumerate(PROGRAMS):
            exec(compile(program, f"docs/quickstart.md, program {i + 1}", "exec"), found)
    return found


def test_each_way_in_learns(names: dict[str, Any]) -> None:
    assert len(PROGRAMS) == 4
    for losses in (names["losses"], names["own_losses"], [names["before"], names["after"]]):
        assert losses[0] == pytest.approx(4.16, abs=0.4), "log(64) at random weights"
        assert losses[-1] < losses[0] - 0.5


def test_each_way_in_runs_as_a_graph(names: dict[str, Any]) -> None:
    assert len(names["trainer"].plan.launches) > 10
    held = accelerated(names["own"])
    assert held is not None and len(held.plan.launches) > 10
    assert names["theirs"].onward_trainer.plan.launches


def test_the_loss_is_that_of_eager(names: dict[str, Any]) -> None:
    model = GPT2LMHeadModel(names["config"]).eval()
    model.load_state_dict(names["model"].state_dict())
    ids = names["ids"]
    expected = model(input_ids=ids, labels=ids).loss.detach()
    found = names["trainer"].eval_step(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_command_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of `onward finetune` sets up a run; the run itself is left to tests/recipes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("a text\n" * 50)
    (tmp_path / "reviews.csv").write_text("text,label\ngood,1\nbad,0\n")
    commands = [shlex.split(line, comments=True) for line in LINES if line.startswith("onward ")]
    assert [words[1] for words in commands] == ["doctor", *["finetune"] * 4]
    for words in commands[1:]:
        assert cli.main(["config", "show", *words[2:]]) == 0
