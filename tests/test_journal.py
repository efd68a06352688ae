"""What the journal of a compilation tells: the ops that each pass took and wrote."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from tiny import batch, compiled, gpt2

from onward.graph.printer import count_ops
from onward.journal import Journal


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("rewrite ")]


def test_each_pass_tells_its_edits_and_the_change_of_ops(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    with caplog.at_level(logging.DEBUG, logger="onward"):
        made = compiled(gpt2(layers=1), batch(), keep_stages=True)
    stages = dict(made.journal.stages or [])
    names = [name for name in stages if name.startswith("forward-")]
    edits = {r.name: r.edits for r in made.journal.reports if r.edits}
    lines = [line for line in told(caplog) if re.search(r": \d+ edits", line)]
    assert len(lines) >= 5
    for line in lines:
        stage, name, what = re.fullmatch(r"rewrite (\w+): (\w+): (.*)", line).groups()  # type: ignore[union-attr]
        at = f"{stage}-{name}"
        before = stages["capture" if at == names[0] else names[names.index(at) - 1]]
        first, *changes = what.split(", ")
        assert first == f"{edits[name]} edits"
        moved = {op: int(n) for op, n in (c.split(" ") for c in changes)}
        left = count_ops(stages[at])
        left.subtract(count_ops(before))
        assert moved == {op: n for op, n in left.items() if n}


def test_without_debug_nothing_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="onward"):
        made = compiled(gpt2(layers=1), batch(), keep_stages=True)
    assert not [line for line in told(caplog) if "edits" in line]
    assert made.journal._ops is None


def test_a_quiet_journal_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made = compiled(gpt2(layers=1), batch())
    with caplog.at_level(logging.DEBUG, logger="onward"):
        Journal(quiet=True).note("capture", made.captured.graph)
        made.compiler.quiet().forward(made.captured)
    assert not told(caplog)
