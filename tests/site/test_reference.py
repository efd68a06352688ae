"""The reference has every public name once, and docstrings become what Sphinx reads."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
MODULES = {
    "onward": ["onward"],
    "optim": ["onward.optim"],
    "extend": ["onward.extend"],
    "integrations": ["onward.integrations.transformers", "onward.integrations.torch_compile"],
}
# names that are documented as others, or are no user's
LEFT_OUT = {"__version__", "data", "loss", "optim", "CompiledGraph"}
# names that a page's prose explains
ELSEWHERE = {
    # types that are aliases, tables, and classes of onnx_ir
    "ALONG_ROWS", "KERNELS", "OPS", "OPTIMIZERS", "Answer", "DType", "GradientRule", "Gradients",
    "Group", "Launch", "Node", "OnwardError", "Shape", "Size", "Translation", "Value",
}  # fmt: skip


def page(name: str) -> str:
    return (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")


def module(name: str) -> ModuleType:
    if name == "onward.optim":  # a name of the package, not a file
        name = "onward.train.optim"
    return importlib.import_module(name)


@pytest.mark.parametrize("name", MODULES)
def test_a_page_has_the_public_names(name: str) -> None:
    text = page(name)
    shown = re.findall(r"^\.\. auto(?:class|function|exception):: ([\w.]+)$", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    for path in MODULES[name]:
        names = set(module(path).__all__)
        here = {each.removeprefix(f"{path}.") for each in shown if each.startswith(f"{path}.")}
        own = {each for each in here if "." not in each}
        assert own <= names, "nothing that is not public"
        for left in names - own - LEFT_OUT:
            assert left in ELSEWHERE and re.search(rf"`{left}`", text), left


def test_pages_are_in_the_tree() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert {p.stem for p in (DOCS / "reference").glob("*.md")} == set(MODULES)
    assert set(re.findall(r"^reference/(\w+)$", index, re.MULTILINE)) == set(MODULES)
    top = {p.stem for p in DOCS.glob("*.md")} - {"index"}
    assert top - set(re.findall(r"^([\w-]+)$", index, re.MULTILINE)) == set()


def test_notes_are_listed() -> None:
    notes = {p.name for p in (DOCS / "notes").glob("0*.md")}
    listed = re.findall(r"^- \[.*\]\((0.*\.md)\)$", (DOCS / "notes/index.md").read_text(), re.M)
    assert sorted(notes) == listed


def docstrings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "docstrings.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Makes `x` of *y.", "Makes ``x`` of \\*y.\n"),
        ("Ends in lr_ and a|b.", "Ends in lr\\_ and a\\|b.\n"),
        ("a: one.\n    goes on. b, c: two.", "- ``a``: one. goes on.\n- ``b``, ``c``: two.\n"),
        ("A rule.\nb: two. Seen: 3; fix: do.", "A rule.\n\n- ``b``: two. Seen: 3; fix: do.\n"),
        ("a: one. Raises E\n    for b.", "- ``a``: one.\n\nRaises E for b.\n"),
        ("Runs x. where: no item here.", "Runs x. where: no item here.\n"),
        ("So:\n\n    x = *y\n      z\n\n    more\n\nEnd.",
         "So:\n\n.. code-block:: python\n\n        x = *y\n          z\n\n        more\n\nEnd.\n"),
        ("- one `a`\n- two", "- one ``a``\n- two\n"),
    ],
)  # fmt: skip
def test_plain_prose_becomes_markup(text: str, expected: str) -> None:
    assert "\n".join(docstrings().restructured(text.splitlines())) == expected
