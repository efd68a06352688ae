"""The table of planted faults stays true: each text is there once, and names tests that exist."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults import FAULTS, Fault
from run import ROOT, mutated


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_applies(fault: Fault) -> None:
    assert mutated(fault) != (ROOT / "src/onward" / fault.file).read_text()
    compile(mutated(fault), fault.file, "exec")
    for path, _, test in (t.partition("::") for t in fault.tests):
        assert (
            f"def {test.partition('[')[0]}" in (ROOT / "tests" / path).read_text()
            if test
            else (ROOT / "tests" / path).exists()
        )


def test_names_are_different() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("old", ["no such text", "return"])
def test_a_text_that_is_not_there_once_is_refused(old: str) -> None:
    with pytest.raises(ValueError, match=r"the text occurs \d+ times in .*; fix: "):
        mutated(replace(FAULTS[0], old=old))
