"""docs/tutorial.md: each excerpt stands in its file, each path exists, the program prints what the
page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from onward.kernels import host

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"(?:^<!-- from: (?P<path>\S+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
BLOCKS = [match.groupdict() for match in BLOCK.finditer(TEXT)]
EXCERPTS = [block for block in BLOCKS if block["path"]]


def own(language: str) -> str:
    """The only block of this language that is no excerpt."""
    [code] = [b["code"] for b in BLOCKS if b["language"] == language and not b["path"]]
    return code


def occurs(code: str, text: str) -> bool:
    """Whether `code` stands in `text` as whole consecutive lines."""
    return f"\n{code}" in f"\n{text}"


@pytest.mark.parametrize(
    "block", EXCERPTS, ids=lambda b: f"{b['path']}: {b['code'].strip().splitlines()[0]}"
)
def test_excerpts_stand_in_their_files(block: dict[str, str]) -> None:
    assert occurs(block["code"], (ROOT / block["path"]).read_text(encoding="utf-8"))


def test_an_excerpt_that_was_changed_is_found() -> None:
    assert occurs("    b = 1\n", "a = 0\n    b = 1\nc = 2\n")
    assert not occurs("b = 1\n", "a = 0\n    b = 1\nc = 2\n"), "lines are whole"
    assert not occurs("a = 0\nc = 2\n", "a = 0\nb = 1\nc = 2\n"), "and none is left out"


def test_every_block_of_sources_says_where_it_is_from() -> None:
    assert TEXT.count("```") == 2 * len(BLOCKS)
    assert TEXT.count("<!-- from:") == len(EXCERPTS) > 20
    assert [b["language"] for b in BLOCKS if not b["path"]] == ["python", "text", ""]


def test_files_that_are_named_exist() -> None:
    named = re.findall(r"`((?:[\w.]+/)+\w+\.(?:py|cpp|h))`", TEXT)
    named += re.findall(r"\btests/[\w/]+\.py", own(""))
    assert len(named) > 15
    missing = [n for n in named if not any((r / n).exists() for r in (ROOT, ROOT / "src/onward"))]
    assert not missing


def test_the_program_prints_what_the_page_says() -> None:
    if not host().has_library:
        pytest.skip("the page is about a machine with the native kernels")
    torch.manual_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(own("python"), "docs/tutorial.md", "exec"), {"__name__": "tutorial"})
    assert printed.getvalue() == own("text")
