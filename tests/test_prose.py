"""Prose does not drift: every file, option, command, pass and name that it names is there.

`prose.py` has the checkers, `prose_allowed.py` the words that only look like names.
"""

from __future__ import annotations

import re

import prose
import pytest
from prose import Check, Line
from prose_allowed import ALLOWED

GUARANTEES = "docs/guarantees.md"


@pytest.mark.parametrize("check", prose.CHECKS, ids=lambda check: check.__name__)
def test_what_prose_names_is_there(check: Check) -> None:
    assert prose.missing(check, prose.prose()) == []


# what each checker takes, and what it finds missing
PLANTED: dict[str, tuple[Check, str, list[str]]] = {
    "a script": (prose.paths, "benchmarks/cpu.py, benchmarks/gone.py", ["benchmarks/gone.py"]),
    "a module": (prose.paths, "`graph/graph.py`, `graph/gone.py`", ["graph/gone.py"]),
    "beside": (prose.paths, "`log.md`, `gone.md`", ["gone.md"]),
    "up": (prose.paths, "`../README.md`, `../GONE.md`", ["../GONE.md"]),
    "a folder": (prose.paths, "`tests/capture/` and `tests/gone/`", ["tests/gone/"]),
    "a pattern": (prose.paths, "`graph/ops/<x>.py`, `graph/gone/<x>.py`", ["graph/gone/<x>.py"]),
    "a sentence's end": (prose.paths, "In tests/conftest.py. In tests/gone.py.", ["tests/gone.py"]),
    "a link": (prose.links, "[a](log.md) [b](gone.md) [c](https://x.org/y.md)", ["gone.md"]),
    "an anchor": (prose.links, "[a](log.md#gone) [b](guarantees.md#numbers)", ["log.md#gone"]),
    "an anchor here": (prose.links, "[a](#storage) [b](#gone)", ["#gone"]),
    "an option": (
        prose.trainer_options, "`TrainerOptions(verify=True, gone=1)`", ["TrainerOptions(gone=)"],
    ),
    "a field": (
        prose.trainer_options, "`TrainerOptions.seed`, `TrainerOptions.gone`",
        ["TrainerOptions.gone"],
    ),
    "a module's option": (
        prose.trainer_options, "`ModuleOptions(strict=True, gone=1)`", ["ModuleOptions(gone=)"],
    ),
    "a switch": (prose.command_line, "`--bf16`, --export_dtype and `--gone`", ["--gone"]),
    "a verb": (prose.command_line, "`onward explain gpt2-tiny`, `onward gone`", ["onward gone"]),
    "a target": (prose.make, "`make test-whole`, `make gone`", ["make gone"]),
    "a target in a block": (prose.make, "$ make gone   # so", ["make gone"]),
    "a verb in a block": (prose.command_line, "$ onward gone gpt2-tiny", ["onward gone"]),
    "make's variable": (prose.make, "TEST_ARGS and GONE_ARGS", ["GONE_ARGS"]),
    "a variable": (prose.variables, "ONWARD_CACHE=x, ONWARD_GONE=x", ["ONWARD_GONE"]),
    "a pass": (prose.rewrite_passes, "the pass `row_demand`, the pass `gone`", ["pass gone"]),
    "a pass before": (prose.rewrite_passes, "the `gemm_add` pass, `gone` passes", ["pass gone"]),
    "passes left out": (prose.rewrite_passes, 'disable=("noop", "gone")', ["pass gone"]),
    "passes by variable": (prose.rewrite_passes, "`ONWARD_DISABLE=noop,gone`", ["pass gone"]),
    "a dotted name": (
        prose.dotted, "onward.extend, onward.gone, onward.Trainer.verify", ["onward.gone"],
    ),
    "a method": (prose.dotted, "`onward.Trainer.gone()`", ["onward.Trainer.gone"]),
    "a name in a module": (
        prose.dotted, "`onward.graph.types.Dim`, `onward.graph.types.Gone`",
        ["onward.graph.types.Gone"],
    ),
    "an attribute": (prose.dotted, "`Plan.peak`, `Plan.gone`, `Trainer.plan`", ["Plan.gone"]),
    "a variable's": (prose.instances, "`trainer.plan`, `trainer.gone()`", ["trainer.gone"]),
    "a result's": (prose.instances, "`result.updated`, `result.gone`", ["result.gone"]),
    "a place": (
        prose.places, "`STEP` of `rewrite/lists.py`, `GONE` of `rewrite/lists.py`",
        ["GONE of rewrite/lists.py"],
    ),
    "a place before": (
        prose.places, "`lists.py`'s `STEP`, `lists.py`'s `GONE`", ["GONE of lists.py"],
    ),
    "a word": (prose.identifiers, "`kernel_for`, `input_7`, `kernel_gone(x)`", ["kernel_gone"]),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
def test_a_name_that_is_not_there_is_found(case: str) -> None:
    check, text, expected = PLANTED[case]
    line = Line(GUARANTEES, 7, text)
    assert list(check(line)) == expected
    assert prose.missing(check, [line]) == [
        f"{GUARANTEES}:7: names {name}, which is not there" for name in expected
    ]


def test_every_checker_has_planted_names() -> None:
    assert {check for check, _, _ in PLANTED.values()} == set(prose.CHECKS)


def test_prose_of_a_source_is_its_docstrings_and_comments() -> None:
    text = """\'\'\'A module.

More.\'\'\'
x = \'\'\'no prose
\'\'\'  # of x
class A:
    \'\'\'A class.\'\'\'
    # why
    y = f("#no", 1)
    \'\'\'y.\'\'\'
""".replace("'" * 3, '"' * 3)
    found = sorted((line.number, line.text) for line in prose.prose_of_source("a.py", text))
    assert [number for number, _ in found] == [1, 2, 3, 5, 7, 8, 10]
    assert [told for _, told in found] == [
        "A module.", "", "More.", "of x", "A class.", "why", "y.",
    ]  # fmt: skip
    words = {"x", "no", "prose", "class", "A", "y", "f", "1"}
    assert set(re.findall(r"\w+", prose.code(text))) == words


def test_a_released_part_of_the_changelog_may_name_what_has_gone() -> None:
    text = "# Changelog\n\n## Unreleased\n\n`a`\n```\nmake x\n```\n\n## 0.1\n\n`b`\n"
    found = [line.text for line in prose.prose_of_page("CHANGELOG.md", text)]
    assert {"`a`", "$ make x"} <= set(found)
    assert "`b`" not in found


def test_what_is_allowed_is_met() -> None:
    """Each line of the list is needed by some prose; one that nothing needs has to go."""
    checks = {check.__name__: check for check in prose.CHECKS}
    for each in ALLOWED:
        assert each.reason
        assert any(
            re.fullmatch(each.where, line.path) and re.fullmatch(each.names, name)
            for line in prose.prose()
            for name in checks[each.check](line)
        ), each


# ---- guarantees


def test_each_promise_stands_once_and_is_held() -> None:
    page = prose.texts()[GUARANTEES]
    assert len(list(prose.promises(page))) > 80
    assert prose.alike(page) == []
    assert prose.untested(page, prose.texts()) == []
    assert prose.without_test(page) == []


ROW = "| Masks of dropout depend on the seed and the token | `tests/a/test_b.py` |"


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (ROW, True),
        (ROW.replace("Masks of dropout", "The masks of dropout").replace("_b", "_c"), True),
        ("| Steps that fail change neither weights nor the seed | `tests/a/test_b.py` |", False),
    ],
)
def test_rows_that_say_the_same_are_found(second: str, found: bool) -> None:
    page = f"# G\n\n| promised | test |\n|---|---|\n{ROW}\n{second}\n"
    assert prose.alike(page) == (["rows 5 and 6 say the same"] if found else [])


@pytest.mark.parametrize(
    ("path", "text", "holds"),
    [
        ("tests/a/test_b.py", "def test_c() -> None: ...\n", True),
        ("tests/a/test_b.py", "class TestC:\n    def test_c(self) -> None: ...\n", True),
        ("tests/a/test_b.py", "def helper() -> None: ...\n", False),
        ("tests/a/test_c.py", "def test_c() -> None: ...\n", False),
        ("tests/a/test_b.py", "pytestmark = pytest.mark.skip('x')\n\ndef test_c(): ...\n", False),
        ("tests/a/test_b.py", "pytestmark = pytest.mark.skipif(x)\n\ndef test_c(): ...\n", True),
        ("tests/a/test_b.py", "pytest.skip(x, allow_module_level=1)\ndef test_c(): ...\n", False),
    ],
)  # fmt: skip
def test_a_row_without_a_test_is_found(path: str, text: str, holds: bool) -> None:
    wrong = [] if holds else ["row 1 names tests/a/test_b.py, which tests nothing"]
    assert prose.untested(ROW, {path: text}) == wrong


@pytest.mark.parametrize(
    ("cell", "found"), [("`tests/a/test_b.py`", []), ("none yet", ["row 3 names no test"])]
)
def test_a_row_that_names_no_test_is_found(cell: str, found: list[str]) -> None:
    assert prose.without_test(f"| promised | test |\n|---|---|\n| All | {cell} |\n") == found


def test_a_row_may_name_a_folder() -> None:
    row = "| All | `tests/a` |"
    assert prose.untested(row, {"tests/a/b/test_c.py": "def test_c(): ...\n"}) == []
    assert prose.untested(row, {"tests/a/tools.py": "def test_c(): ...\n"}) != []
    assert prose.untested(row, {"tests/ab/test_c.py": "def test_c(): ...\n"}) != []


# ---- numbers


def test_the_page_of_fuzzing_has_the_seconds_of_ci() -> None:
    run = (prose.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    page = " ".join(prose.texts()["docs/fuzzing.md"].split())
    programs, files = (
        re.search(rf" {name}=.--seconds (\d+)", run) for name in ("FUZZ_ARGS", "FUZZ_FILES_ARGS")
    )
    assert programs is not None and files is not None
    assert f"`.ci/run` does it for {programs[1]} seconds" in page
    assert f"`.ci/run` loads files for {files[1]} seconds" in page


# ---- docstrings


def test_docstrings_and_comments_stand_alone() -> None:
    found = [
        f"{path}:{number}: begins without its subject: {first}"
        for path, text in prose.texts().items()
        if path.endswith(".py")
        for number, first in prose.without_subject(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("first", "stands"),
    [
        ("Of the batch.", False),
        ("The same, of a graph.", False),
        ("Those that are read.", False),
        ("Its bytes.", False),
        ("That of a node.", False),
        ("These are read.", False),
        ("Which of them are read.", False),
        ("Whether it is read.", False),
        ("Whether both are the same.", False),
        ("Whether the value is a constant.", True),
        ("Offsets of the buffers.", True),
        ("Itself a graph.", True),
        ("Bytes of the buffer.", True),
    ],
)
def test_a_docstring_without_its_subject_is_found(first: str, stands: bool) -> None:
    text = f'def f():\n    """{first}\n\n    More."""\n'
    assert list(prose.without_subject(text)) == ([] if stands else [(2, first)])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# of the batch\nx = 1\n", [(1, "of the batch")]),
        ("# The batch, and\n# of the batch\nx = 1\n", []),
        ("x = 1  # of the batch\n", []),
        ("def f():\n    # the same again\n    return 1\n", [(2, "the same again")]),
    ],
)
def test_a_comment_without_its_subject_is_found(text: str, found: list[tuple[int, str]]) -> None:
    assert list(prose.without_subject(text)) == found
