"""The page of errors has one row for each public error and warning, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from onward import errors

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"


def test_each_public_error_has_one_row() -> None:
    public = sorted(
        name
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, Exception)
        and value.__module__ == errors.__name__
    )
    assert len(public) > 5
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)) == public
