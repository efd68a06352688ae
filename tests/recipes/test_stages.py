"""What the command line shows while a step is compiled: the stages, then one line of seconds."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import mlp
from torch import nn

import onward
from onward.recipes.progress import Progress
from onward.recipes.stages import StageLine, Stages

X, Y = torch.randn(6, 8), torch.arange(6) % 5


@pytest.fixture
def trainer() -> onward.Trainer:
    return onward.Trainer(mlp(), onward.optim.SGD(), nn.functional.cross_entropy)


@pytest.fixture(autouse=True)
def log_left_as_it_was() -> Iterator[None]:
    log = logging.getLogger("onward")
    before = log.level, list(log.handlers)
    yield
    assert (log.level, log.handlers) == before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_stages_begin_in_order_and_their_seconds_are_the_reports(trainer: onward.Trainer) -> None:
    begun: list[str] = []
    with Stages(begun.append) as stages:
        trainer.train_step(X, Y)
        seconds = trainer.report()["compile_seconds"]
        assert list(dict.fromkeys(begun)) == list(seconds)
        assert stages.seconds == pytest.approx(seconds)
        total = sum(seconds.values())
        assert stages.taken().startswith(f"compiled in {total:.1f} s")
        assert stages.taken() == "", "told once"
        begun.clear()
        trainer.train_step(X, Y)
    assert begun == [] and stages.taken() == ""


def test_the_log_is_left_alone_after_an_error() -> None:
    with pytest.raises(RuntimeError), Stages(print):
        raise RuntimeError  # and the fixture looks


def test_one_line_where_nobody_watches(
    trainer: onward.Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with StageLine("verify"):
            trainer.eval_step(X, Y)
    printed = capsys.readouterr()
    assert re.fullmatch(r"verify: compiled in \d+\.\d s( \(.*\))?\n", printed.err)
    assert printed.out == ""


def test_a_terminal_follows_the_stages(
    trainer: onward.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with StageLine("verify"):
        trainer.eval_step(X, Y)
    shown = terminal.getvalue().split("\r\033[K")
    assert "verify: compiling: capture" in shown and "verify: compiling: plan" in shown
    assert shown[-1].startswith("verify: compiled in ") and shown[-1].count("\n") == 1


@pytest.mark.parametrize("watched", [True, False])
def test_progress_says_that_it_compiles(
    watched: bool, trainer: onward.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal() if watched else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("onward", tmp_path / "metrics.jsonl", 2, 2, 1) as progress:
        for i in (1, 2):
            progress.update(i, float(trainer.train_step(X, Y).loss), None, 0.1, 6)
    text = stream.getvalue()
    if watched:
        assert "compiling: capture" in text and "step/s" in text
    else:
        lines = text.splitlines()
        assert lines[0].startswith("onward: compiled in ") and len(lines) == 3
    assert len([json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]) == 2
