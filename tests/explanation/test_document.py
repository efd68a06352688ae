"""docs/explain.md names the options, kinds and fields that there are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from onward.explanation import StepExplanation
from onward.explanation.facts import KINDS, NOT_COUNTED, LargestBatch, StepMemory
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
    kinds = {"memory": StepMemory, "largest": LargestBatch}
    named = re.findall(r"found\.(\w+)\.(\w+)", TEXT)
    assert {name for name, _ in named} == set(kinds)
    for name, field in named:
        assert name in StepExplanation.__dataclass_fields__
        assert field in kinds[name].__dataclass_fields__
