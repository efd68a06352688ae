"""Docstrings as reStructuredText: the house style is plain prose, which Sphinx would misread.

A docstring has paragraphs; a paragraph may explain names (`name: what it is.`), and an indented one
is code. Names stand in single backticks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

_NAMES = r"[a-z_]\w*(?:, [a-z_]\w*)*"
# a name that is explained begins a sentence
_ITEM = re.compile(rf"(?:^|(?<=[.;])\s)(?P<names>{_NAMES}):\s")
# what a call raises or returns is a paragraph of its own behind explained names
_CLOSING = re.compile(r"(?<=[.;])\s(?=(?:Raises|Returns) )")
_CODE = re.compile(r"`+([^`]+)`+")


def restructured(lines: Iterable[str]) -> list[str]:
    """The docstring's lines in reStructuredText: explained names as a list, indented paragraphs as
    code, and no sign of markup in what is prose."""
    found: list[str] = []
    code = False
    for paragraph in _paragraphs(lines):
        indented = all(line.startswith(" ") for line in paragraph)
        if indented:
            found += [
                *([] if code else [".. code-block:: python", ""]),
                *(f"    {line}" for line in paragraph),
                "",
            ]
        else:
            found += _prose(paragraph)
        code = indented
    return found


def _paragraphs(lines: Iterable[str]) -> Iterator[list[str]]:
    held: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            held.append(line.rstrip())
        elif held:
            yield held
            held = []


def _prose(paragraph: list[str]) -> Iterator[str]:
    if paragraph[0].startswith("- "):
        yield from (_escaped(line) for line in paragraph)
        yield ""
        return
    text = "\n".join(line.strip() for line in paragraph)
    items = list(_ITEM.finditer(text))
    if items and items[0].start() > 0:  # in running prose only a name at a line's start counts
        items = [item for item in items if text[item.start()] == "\n"]
    closing = _CLOSING.search(text, items[-1].end()) if items else None
    close = ""
    if closing is not None:
        text, close = text[: closing.start()], text[closing.end() :]
    first = items[0].start() if items else len(text)
    if text[:first].strip():
        yield from (_escaped(" ".join(text[:first].split())), "")
    for item, after in pairwise([*items, None]):
        assert item is not None
        end = len(text) if after is None else after.start()
        told = " ".join(text[item.end() : end].split())
        names = ", ".join(f"``{name}``" for name in item["names"].split(", "))
        yield f"- {names}: {_escaped(told)}"
    if items:
        yield ""
    if close:
        yield from (_escaped(" ".join(close.split())), "")


def _escaped(text: str) -> str:
    parts = _CODE.split(text)  # prose and code in turns
    return "".join(
        f"``{part}``" if i % 2 else re.sub(r"([\\*|]|_(?=\W|$))", r"\\\1", part)
        for i, part in enumerate(parts)
    )


__all__ = ["restructured"]
