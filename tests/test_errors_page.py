"""The page of errors has one row for each error and warning that a user can see, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from onward import errors

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
PARTS = "## Errors of one part"

# subclasses that no user sees by name -> why
INTERNAL = {
    "NotRunError": "transformers' Trainer catches it, and does the step itself",
    "TooMany": "an accelerated model catches it, and the call runs in eager PyTorch",
    "Unasked": "capture catches it, and asks the model again",
    "SizeError": "capture holds the size and tries again, or says CaptureError's message",
}


def rows(text: str) -> list[str]:
    return sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def derived(sources: dict[str, str], base: str) -> dict[str, str]:
    """Classes that derive from `base`, directly or not -> their file."""
    bases: dict[str, tuple[set[str], str]] = {}
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                last = {ast.unparse(b).rpartition(".")[2] for b in node.bases}
                bases[node.name] = last, path
    found: dict[str, str] = {}
    known = {base}
    while True:
        more = {n: path for n, (last, path) in bases.items() if last & known and n not in known}
        if not more:
            return found
        found |= more
        known |= set(more)


def subclasses() -> dict[str, str]:
    package = ROOT / "src" / "onward"
    sources = {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
    }
    return derived(sources, "OnwardError")


def test_each_public_error_has_one_row() -> None:
    public = sorted(
        name
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and value.__module__ == errors.__name__
    )
    assert len(public) > 5
    assert rows(PAGE.partition(PARTS)[0]) == public


def test_each_error_of_a_part_has_one_row_or_a_reason() -> None:
    parts = {name for name, path in subclasses().items() if path != "errors.py"}
    assert set(INTERNAL) <= parts
    assert rows(PAGE.partition(PARTS)[2]) == sorted(parts - set(INTERNAL))


def test_internal_errors_are_caught() -> None:
    """Each is named by an `except` of the package."""
    text = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "src").rglob("*.py"))
    for name in INTERNAL:
        assert re.search(rf"except \(?[\w, ]*\b{name}\b", text), name


def test_a_subclass_of_a_subclass_is_found() -> None:
    sources = {
        "a.py": "class A(errors.OnwardError): ...\nclass B(ValueError): ...",
        "b.py": "def f():\n    class C(B, a.A): ...",
    }
    assert derived(sources, "OnwardError") == {"A": "a.py", "C": "b.py"}
