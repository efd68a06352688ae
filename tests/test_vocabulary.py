"""docs/vocabulary.md: each name in backticks is one of the sources, each term stands once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "vocabulary.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "src" / "onward"
SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))
NAMES = sorted(set(re.findall(r"`([^`]+)`", TEXT)))


def there(name: str) -> bool:
    """Whether a file is there, every part of a dotted name is a word of the code, or an example of
    a type stands in it."""
    if name.endswith(".py"):
        return (PACKAGE / name).exists()
    if not re.fullmatch(r"[\w.]+", name):
        return name in SOURCES
    return all(re.search(rf"\b{part}\b", SOURCES) for part in name.split("."))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_those_of_the_sources(name: str) -> None:
    assert there(name)


def test_a_name_that_is_gone_is_found() -> None:
    gone = ("Kernel" + "Need", "Type." + "narrowed_down", "graph/" + "text.py")
    assert len(NAMES) > 40 and not any(map(there, gone))


def test_each_term_has_one_line() -> None:
    terms = [line.split("|")[1].strip() for line in TEXT.splitlines() if line.startswith("| ")]
    terms = [term for term in terms if term != "term"]
    assert len(terms) == len(set(terms)) > 60
