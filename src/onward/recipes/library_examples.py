"""Labelled examples from the sources of Python's own library, so that every task has real data
on any machine: which package a piece of code is from, what a function is for, and so on.

The built-in corpus decides which files are read, and which of them are evaluated on.
"""

from __future__ import annotations

import ast
import hashlib
import io
import keyword
import random
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.recipes.corpus import library_sources
from onward.recipes.options import InputError
from onward.recipes.tables import Table

Rows = list[dict[str, Any]]
PIECE_LINES = 12  # of a piece of code whose package is asked for
PACKAGES = 6  # those with the most code
CHOICES = 4
_CONTEXT = 900  # characters of a passage that questions are asked about
_WORDS = 48  # words of a sequence whose words have labels
_SUMMARY = 120  # characters of a summary, at most


@dataclass(frozen=True)
class DocumentedFunction:
    """A function of the library. name: its own. code: its source without the docstring. purpose:
    the first sentence of the docstring."""

    name: str
    code: str
    purpose: str


def library_tables(
    make: Callable[[list[tuple[str, str]]], Rows], max_bytes: int, by_file: bool = True
) -> tuple[Table, ...]:
    """The (train, eval) examples that `make` finds in (path, source) pairs of the library's files.

    max_bytes: of sources, at most. by_file: files that are evaluated on are others than those that
    are learnt from; else one table has the examples of all. Raises InputError where there are none.
    """
    sides = library_sources(max_bytes, Path(sysconfig.get_paths()["stdlib"]))
    named = {"train": sides[0], "eval": sides[1]} if by_file else {"": sides[0] + sides[1]}
    made: list[Table] = []
    for name, files in named.items():
        digest = hashlib.sha256("\0".join(f"{p}\0{text}" for p, text in files).encode())
        source = f"python standard library ({name})" if name else "python standard library"
        rows = tuple(make(files))
        if not rows:
            raise InputError(
                "there is no example for this task",
                f"in {source} with --corpus_bytes={max_bytes}",
                "raise --corpus_bytes, or name a --train_file",
            )
        made.append(Table(source, rows, digest.hexdigest()))
    return tuple(made)


def pieces_with_package(files: list[tuple[str, str]]) -> Rows:
    """Rows of `text`, a piece of code, and `label`, the package that it is from."""
    by_package: dict[str, list[str]] = {}
    for path, source in files:
        package = path.split("/")[0].removesuffix(".py")
        if "/" not in path:
            continue
        lines = source.splitlines()
        found = by_package.setdefault(package, [])
        for start in range(0, len(lines) - PIECE_LINES + 1, PIECE_LINES):
            piece = "\n".join(lines[start : start + PIECE_LINES]).strip()
            if len(piece) > 80:
                found.append(piece)
    most = sorted(by_package, key=lambda name: (-len(by_package[name]), name))[:PACKAGES]
    return [{"text": text, "label": name} for name in sorted(most) for text in by_package[name]]


def words_with_kinds(files: list[tuple[str, str]]) -> Rows:
    """Rows of `tokens`, words of code, and `tags`, what each word is there."""
    rows: Rows = []
    for _, source in files:
        words: list[str] = []
        tags: list[str] = []
        for word, tag in _kinds(source):
            words.append(word)
            tags.append(tag)
            if len(words) == _WORDS:
                rows.append({"tokens": words, "tags": tags})
                words, tags = [], []
    return rows


_LITERALS = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.OP: "operator"}


def _kinds(source: str) -> Iterator[tuple[str, str]]:
    """The words of a source, each with its kind: a name by its use."""
    before = ""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return
    for number, token in enumerate(tokens):
        text = token.string
        if token.type == tokenize.NAME:
            follows = tokens[number + 1].string if number + 1 < len(tokens) else ""
            if keyword.iskeyword(text):
                tag = "keyword"
            elif before in ("def", "class"):
                tag = "function" if before == "def" else "class"
            elif before == ".":
                tag = "method" if follows == "(" else "attribute"
            elif follows == "=":
                tag = "assigned"
            else:
                tag = "call" if follows == "(" else "name"
        elif token.type in _LITERALS and len(text) <= 40:
            tag = _LITERALS[token.type]
        else:
            continue
        before = text
        yield text, tag


def functions_of(files: list[tuple[str, str]]) -> Iterator[list[DocumentedFunction]]:
    """The functions of each file that have a docstring."""
    for _, source in files:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in others' sources
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        lines = source.splitlines()
        found: list[DocumentedFunction] = []
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            purpose = _sentence(ast.get_docstring(node) or "")
            if len(purpose) < 15 or len(node.body) < 2:
                continue
            head = lines[node.lineno - 1 : node.body[0].lineno - 1]
            rest = lines[node.body[0].end_lineno or 0 : node.end_lineno]
            code = "\n".join([*head, *rest]).strip("\n")
            found.append(DocumentedFunction(node.name, code, purpose))
        if found:
            yield found


def _sentence(docstring: str) -> str:
    """The first sentence of a docstring, without a signature before it."""
    text = " ".join(docstring.split("\n\n")[0].split())
    end = text.find(". ")
    text = text if end < 0 else text[: end + 1]
    return text if len(text) <= _SUMMARY and "->" not in text else ""


def functions_with_purpose(files: list[tuple[str, str]]) -> Rows:
    """Rows of `text`, a function's code, and `summary`, the first sentence of its docstring."""
    return [
        {"text": one.code[:600], "summary": one.purpose}
        for found in functions_of(files)
        for one in found
    ]


def questions_about_functions(files: list[tuple[str, str]]) -> Rows:
    """Rows of `question`, a purpose, `context`, code with several functions, and `answers`, the
    name of the function with that purpose."""
    rows: Rows = []
    for found in functions_of(files):
        start = 0
        while start < len(found):
            context, inside = "", list[tuple[DocumentedFunction, int]]()
            for one in found[start:]:
                code = one.code[:400]
                if context and len(context) + len(code) > _CONTEXT:
                    break
                at = code.find(one.name)
                if at >= 0:
                    inside.append((one, len(context) + at))
                context += code + "\n\n"
                start += 1
            for one, at in inside:
                rows.append(
                    {
                        "id": str(len(rows)),
                        "question": one.purpose,
                        "context": context,
                        "answers": {"text": [one.name], "answer_start": [at]},
                    }
                )
    return rows


def choices_of_functions(files: list[tuple[str, str]]) -> Rows:
    """Rows of `question`, a purpose, `choices`, the code of functions of one file, and `label`, the
    number of the one with that purpose."""
    drawn = random.Random(0)
    rows: Rows = []
    for found in functions_of(files):
        if len(found) < CHOICES:
            continue
        for number, one in enumerate(found):
            others = [f for i, f in enumerate(found) if i != number and f.code != one.code]
            if len(others) < CHOICES - 1:
                continue
            chosen = drawn.sample(others, CHOICES - 1)
            label = drawn.randrange(CHOICES)
            chosen.insert(label, one)
            rows.append(
                {
                    "question": one.purpose,
                    "choices": [f.code[:300] for f in chosen],
                    "label": label,
                }
            )
    return rows


def most_frequent(labels: list[Any]) -> tuple[Any, float]:
    """The most frequent label, and its share."""
    label, count = Counter(labels).most_common(1)[0]
    return label, count / len(labels)


__all__ = [
    "CHOICES",
    "choices_of_functions",
    "functions_with_purpose",
    "library_tables",
    "most_frequent",
    "pieces_with_package",
    "questions_about_functions",
    "words_with_kinds",
]
