"""Columns of a table that a text, or a pair of texts, is read from."""

from __future__ import annotations

from onward.recipes.options import InputError
from onward.recipes.tables import Table

TEXTS = ("text", "sentence")
# the pairs of GLUE, and those of the usual tables of questions and of queries
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "text_pair"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("sentence_A", "sentence_B"),
    ("question", "passage"),
    ("question", "context"),
    ("question", "answer"),
    ("query", "document"),
    ("query", "passage"),
)
_KNOWN = frozenset((*TEXTS, *(name for pair in PAIRS for name in pair)))


def text_columns(table: Table, given: str | None, label: str) -> tuple[str, str | None]:
    """The column of the text, and that of the second text of a pair or None: those that are given,
    else the one known pair or name among the table's columns, else its only column of text. Raises
    InputError where the table has none, or several among which the choice is not plain.

    given: one or two names, with a comma between them. label: the column of labels.
    """
    if given is not None:
        named = [name for name in given.split(",") if name]
        if not 0 < len(named) < 3:
            raise InputError(
                f"{len(named)} columns of text ({', '.join(named)})",
                "in --text_column",
                "name one, or two for a pair",
            )
        first, *others = [table.column(name, (), "text_column") for name in named]
        return first, others[0] if others else None
    texts = _of_text(table, label)
    known = [name for name in texts if name in _KNOWN]
    pairs = [pair for pair in PAIRS if set(pair) <= set(texts)]
    if len(pairs) == 1 and len(known) == 2:
        return pairs[0]
    if len(texts) == 1:
        return texts[0], None
    if len(known) == 1 and known[0] in TEXTS:
        return known[0], None
    if not texts:
        table.column(None, TEXTS, "text_column")  # raises
    raise InputError(
        f"several columns have texts ({', '.join(texts)})",
        f"in {table.source}",
        "name one with --text_column, or two for a pair",
    )


def columns_fact(table: Table, first: str, second: str | None, label: str) -> str:
    """The columns that are read, and those that are not used, in words."""
    read = [first, label] if second is None else [first, second, label]
    others = [name for name in table.rows[0] if name not in read]
    unused = ", ".join(others[:8]) + (", ..." if len(others) > 8 else "")
    text = first if second is None else f"the pair {first}, {second}"
    return f"reads {text}, and labels from {label}" + (f"; not used: {unused}" if others else "")


def _of_text(table: Table, label: str) -> list[str]:
    """The columns but for labels that have a text in some row, or numbers under a known name."""
    found: list[str] = []
    for name, value in table.rows[0].items():
        is_known = name in _KNOWN and isinstance(value, str | int | float)
        is_text = (is_known and not isinstance(value, bool)) or any(
            _is_text(row.get(name)) for row in table.rows
        )
        if name != label and is_text:
            found.append(name)
    return found


def _is_text(value: object) -> bool:
    """Whether a value is a text that is more than a number."""
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


__all__ = ["PAIRS", "TEXTS", "columns_fact", "text_columns"]
