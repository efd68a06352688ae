"""docs/explain.md names the options, kinds and fields that there are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from onward.cli import main
from onward.explanation import StepExplanation
from onward.explanation.facts import KINDS, NOT_COUNTED, GpuTime, LargestBatch, StepMemory
from onward.recipes.explain_options import ExplainConfig

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "explain.md").read_text(encoding="utf-8")


def test_options_are_those_of_the_command() -> None:
    named = re.findall(r"^\| `--(\w+)`", TEXT, re.MULTILINE)
    assert named == [field.name for field in dataclasses.fields(ExplainConfig)]


def test_kinds_are_those_of_the_table() -> None:
    for kind, meaning in KINDS.items():
        shown = re.search(rf"^  {kind} +[\d.]+ +[\d.]+  {re.escape(meaning)}$", TEXT, re.MULTILINE)
        assert shown or kind == "gaps"
    assert all(f"  not counted: {what}\n" in TEXT for what in NOT_COUNTED)


def test_fields_are_those_of_an_explanation() -> None:
    kinds = {"memory": StepMemory, "largest": LargestBatch, "time": GpuTime}
    named = re.findall(r"found\.(\w+)\.(\w+)", TEXT)
    assert {name for name, _ in named} == set(kinds)
    for name, field in named:
        assert name in StepExplanation.__dataclass_fields__
        assert field in kinds[name].__dataclass_fields__ or hasattr(kinds[name], field)


def test_the_table_of_meshes_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = re.search(r"^```\n\$ onward (explain .*)\n([^`]*)^```$", TEXT, re.MULTILINE)
    assert shown
    assert main(shown[1].split()) == 0
    said, number = capsys.readouterr().out, re.compile(r"\d[\d,]*\.?\d*")
    assert re.sub(r" +", " ", number.sub("N", said)) == re.sub(
        r" +", " ", number.sub("N", shown[2])
    )
    # workspaces of kernels depend on threads and on the processor, by less than a few MiB
    pairs = zip(number.findall(said), number.findall(shown[2]), strict=True)
    for found, want in ((float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs):
        assert found == pytest.approx(want, rel=0.03, abs=1.0 if want > 5 else 0.05)
