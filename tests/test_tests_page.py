"""tests/README.md: each folder, shared module and marker has its line, and what it names exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGE = (HERE / "README.md").read_text(encoding="utf-8")


def first_cells(heading: str) -> list[str]:
    """What stands in backticks in the first cells of the table with this heading row."""
    _, _, rest = PAGE.partition(f"{heading}\n")
    assert rest, f"no table {heading}"
    rows = rest.partition("\n\n")[0].splitlines()[1:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_every_folder_has_its_line() -> None:
    folders = {path.parent.relative_to(HERE).parts[0] for path in HERE.glob("*/**/*.py")}
    assert sorted(first_cells("| folder | tests |")) == sorted(folders)


def test_every_shared_module_has_its_line() -> None:
    modules = [path.stem for path in (HERE / "support").glob("*.py")]
    assert sorted(first_cells("| module | gives |")) == sorted(modules)


def test_no_shared_module_lies_elsewhere() -> None:
    """A module that two folders import is found in one place."""
    flat = {path.name for path in HERE.glob("*.py") if not path.name.startswith("test_")}
    assert flat == {"conftest.py"}


def test_markers_are_those_that_are_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lines = declared["tool"]["pytest"]["ini_options"]["markers"]
    assert sorted(first_cells("| marker | meaning |")) == sorted(x.split(":")[0] for x in lines)


def test_targets_and_options_exist() -> None:
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"`make ([a-z-]+)", PAGE)
    assert {"test-tiny", "test-quick", "test", "test-whole"} <= set(named) <= rules
    source = (HERE / "conftest.py").read_text(encoding="utf-8")
    ours = set(re.findall(r'addoption\(\s*"(--[\w-]+)"', source))
    others = {"--dist", "--only", "--shrink"}  # pytest-xdist's, the fuzzer's
    assert ours <= set(re.findall(r"--[a-z]+", PAGE)) <= ours | others


def test_files_that_are_named_exist() -> None:
    named = re.findall(r"\btests/[\w/]+\.py", PAGE)
    named += [f"tests/{name}" for name in re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE)]
    assert len(named) > 5
    assert [
        name for name in named if not (ROOT / name.replace("tests/tests/", "tests/")).exists()
    ] == []
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (HERE / link).exists(), link
