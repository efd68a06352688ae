"""docs/what-works-where.md is its table, every test that it names exists, and no page says else."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
from what_works import PAGE, ROOT, ROWS, page

TESTS = sorted({test for cells in ROWS.values() for _, test in cells if test is not None})
DOCS = ROOT / "docs"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("test", TESTS)
def test_tests_that_are_named_exist(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert (name in found) if name else any(n.startswith("test_") for n in found)


def test_a_cell_that_works_names_a_test() -> None:
    said = {text.partition(":")[0] for c in ROWS.values() for text, test in c if test is None}
    assert said <= {
        "no", "not yet", "not tested", "by the model itself", "runs, with Triton kernels",
        "see [integrations](integrations.md)",
    }  # fmt: skip


@pytest.mark.parametrize("page", ["README", "from-optimum", "from-ortmodule"])
def test_pages_of_migration_leave_it_to_the_table(page: str) -> None:
    text = (DOCS / "migration" / f"{page}.md").read_text(encoding="utf-8")
    assert "what-works-where.md" in text
    for line in text.splitlines():
        if re.search(r"bf16|\bDDP\b|ddp_backend", line) and "Apex" not in line:
            assert "not there yet" not in line, line


def test_no_promise_is_written_twice() -> None:
    lines = (DOCS / "guarantees.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and "`tests/" in line]
    assert rows and len(rows) == len(set(rows))


def test_the_import_within_a_list_of_names() -> None:
    """Both sides of the diff are run: the same names, of which one is Onward's."""
    text = (DOCS / "integrations.md").read_text(encoding="utf-8")
    [diff] = [
        b for b in re.findall(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) if "(" in b
    ]
    sides: list[dict[str, Any]] = []
    for side in "-+":
        found: dict[str, Any] = {}
        exec("\n".join(x[1:] for x in diff.splitlines() if x[:1] in (" ", side)), found)
        sides.append({k: v for k, v in found.items() if not k.startswith("__")})
    assert sides[0].keys() == sides[1].keys()
    assert [k for k, v in sides[0].items() if v is not sides[1][k]] == ["Trainer"]
    assert sides[1]["Trainer"].__module__.startswith("onward.")
