"""Tables of examples: CSV, TSV, JSON lines and parquet files, and saved datasets, as rows."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onward.errors import MissingExtraError, one_line
from onward.recipes.options import InputError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
LINES = (".jsonl", ".json", ".ndjson")
FORMATS = "a .csv, .tsv, .jsonl or .parquet file, or a folder of datasets' save_to_disk"


@dataclass(frozen=True)
class Table:
    """Rows by the names of their columns.

    source: a path, or the name of a built-in corpus. lines: the number of each row's last line in
    the file, or its own number, from 1. sha256: of the bytes read. unit: what `lines` count.
    """

    source: str
    rows: tuple[dict[str, Any], ...]
    sha256: str
    lines: tuple[int, ...] = ()
    unit: str = "line"
    documents: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not self.documents:
            texts = tuple(text for row in self.rows for text in _texts(row.values()))
            object.__setattr__(self, "documents", texts)

    def __len__(self) -> int:
        """The number of characters in all texts."""
        return sum(map(len, self.documents))

    def where(self, index: int) -> str:
        """The place of a row, in words: `in data.csv, line 7`."""
        if not self.lines:
            return f"in {self.source}, row {index + 1}"
        return f"in {self.source}, {self.unit} {self.lines[index]}"

    def column(self, given: str | None, usual: Sequence[str], option: str) -> str:
        """The column that is given, else the first of the usual ones that the rows have. Raises
        InputError where there is none. option: the switch that names it."""
        names, have = usual if given is None else [given], self.rows[0]
        found = next((name for name in names if name in have), None)
        if found is None:
            raise InputError(
                f"there is no column {' or '.join(map(repr, names))} (but "
                f"{', '.join(map(repr, have))})",
                f"in {self.source}",
                f"name the column with --{option}",
            )
        return found

    def value(self, index: int, name: str, kinds: type | tuple[type, ...], words: str) -> Any:
        """A row's value of a column. Raises InputError, with its place, for another kind."""
        value = self.rows[index].get(name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            shown = "nothing" if value is None else one_line(repr(value), 40)
            raise InputError(f"column {name!r} has {shown}", self.where(index), f"give {words}")
        return value

    def texts(self, name: str) -> list[str]:
        """All texts of a column; numbers are written out. Raises InputError for others."""
        kinds = (str, int, float)
        return [str(self.value(i, name, kinds, "text")) for i in range(len(self.rows))]


def _texts(values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _texts(value.values())
        elif isinstance(value, list | tuple):
            words = [each for each in value if isinstance(each, str)]
            if words:
                yield " ".join(words)


def is_table(path: Path) -> bool:
    """Whether a file is read as a table by its name; a folder is a saved dataset's."""
    return path.is_dir() or path.suffix.lower() in (*SEPARATORS, *LINES, ".parquet")


def read_table(path: Path, option: str) -> Table:
    """Reads a file or a saved dataset. Raises InputError, with file and line, where that is
    impossible, and MissingExtraError for a format whose package is not installed."""
    where = f"in --{option}"
    if path.is_dir():
        return _of_dataset(path, where)
    suffix = path.suffix.lower()
    if suffix not in (*SEPARATORS, *LINES, ".parquet"):
        raise InputError(f"{str(path)!r} has a format that is not known", where, f"name {FORMATS}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {str(path)!r} ({error.strerror})", where, f"name {FORMATS}"
        ) from error
    if suffix == ".parquet":
        rows, lines, unit = _of_parquet(data, path, where), (), "row"
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{str(path)!r} is not UTF-8 text at byte {error.start}", where, "convert it"
            ) from error
        read = _of_csv if suffix in SEPARATORS else _of_json
        rows, lines = read(text, path)
        unit = "line"
    if not rows:
        raise InputError(f"{str(path)!r} has no row", where, "name a file with examples")
    return Table(str(path), tuple(rows), hashlib.sha256(data).hexdigest(), tuple(lines), unit)


def _of_csv(text: str, path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Rows of a table with a line of names."""
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=SEPARATORS[path.suffix.lower()], strict=True
    )
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    names: list[str] | None = None
    usual = csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # of all readers
    try:
        for values in reader:
            if not values:
                continue
            if names is None:
                names = [name.strip() for name in values]
                twice = next((n for n in names if names.count(n) > 1), None)
                if twice is not None:
                    raise _wrong_row(path, reader.line_num, f"column {twice!r} stands twice")
                continue
            if len(values) != len(names):
                told = f"{len(values)} values for {len(names)} columns"
                raise _wrong_row(path, reader.line_num, told)
            rows.append(dict(zip(names, values, strict=True)))
            lines.append(reader.line_num)
    except csv.Error as error:
        raise _wrong_row(path, reader.line_num, str(error)) from error
    finally:
        csv.field_size_limit(usual)
    return rows, lines


def _of_json(text: str, path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Rows of JSON objects, one a line, or one list of them."""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", 1)
            raise _wrong_row(path, line, f"invalid JSON: {getattr(error, 'msg', error)}") from error
        for number, row in enumerate(found, 1):
            if not isinstance(row, dict):
                raise _wrong_row(path, number, "not a JSON object", "element")
            if not _is_text(row):
                raise _wrong_row(path, number, "an unpaired surrogate", "element")
        return found, []
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    names: set[str] | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _wrong_row(
                path, number, f"invalid JSON: {getattr(error, 'msg', error)}"
            ) from error
        if not isinstance(row, dict):
            raise _wrong_row(path, number, "not a JSON object")
        if "\\u" in line and not _is_text(row):
            raise _wrong_row(path, number, "an unpaired surrogate")
        names = set(row) if names is None else names
        missing = sorted(names - set(row))
        if missing:
            raise _wrong_row(path, number, f"column {missing[0]!r} is missing")
        rows.append(row)
        lines.append(number)
    return rows, lines


def _is_text(row: Mapping[str, Any]) -> bool:
    """Whether all text in a row can be encoded; an escape in JSON may be half of a pair."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong_row(path: Path, line: int, what: str, unit: str = "line") -> InputError:
    return InputError(what, f"in {path}, {unit} {line}", "correct that line, or leave it out")


def _of_parquet(data: bytes, path: Path, where: str) -> list[dict[str, Any]]:
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError("pyarrow", "data")
    from pyarrow import ArrowException
    from pyarrow.parquet import read_table as read

    try:
        return read(io.BytesIO(data)).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"{str(path)!r} is no parquet file ({one_line(str(error), 120)})",
            where,
            f"name {FORMATS}",
        ) from error


def _of_dataset(path: Path, where: str) -> Table:
    """Rows of a dataset that `datasets` has saved; columns of classes give their names."""
    if importlib.util.find_spec("datasets") is None:
        raise MissingExtraError("datasets", "data")
    from datasets import ClassLabel, Dataset, load_from_disk

    try:
        found = load_from_disk(str(path))
    except Exception as error:  # what Arrow and JSON raise for files of others
        raise InputError(
            f"{str(path)!r} is no saved dataset ({one_line(str(error), 160)})",
            where,
            f"name {FORMATS}",
        ) from error
    if not isinstance(found, Dataset):
        raise InputError(
            f"{str(path)!r} has several splits ({', '.join(map(str, found))})",
            where,
            "name the folder of one of them",
        )
    for name, feature in found.features.items():
        if type(feature).__name__ in ("Image", "Audio"):  # as files, which the task decodes
            found = found.cast_column(name, type(feature)(decode=False))
    rows = [dict(row) for row in found]
    if not rows:
        raise InputError(f"{str(path)!r} has no row", where, "name a dataset with examples")
    for name, feature in found.features.items():
        names: Any = feature
        while not isinstance(names, ClassLabel) and hasattr(names, "feature"):
            names = names.feature  # of the elements of a list
        if isinstance(names, ClassLabel):
            for number, row in enumerate(rows, 1):
                try:
                    row[name] = _class_name(row[name], names.int2str)
                except ValueError as error:
                    raise InputError(
                        f"column {name!r} has {one_line(repr(row[name]), 40)}, which is none of "
                        f"its {len(names.names)} classes",
                        f"in {path}, row {number}",
                        "correct that row, or leave it out",
                    ) from error
    digest = hashlib.sha256(json.dumps(rows, default=str, sort_keys=True).encode())
    return Table(str(path), tuple(rows), digest.hexdigest(), (), "row")


def _class_name(value: Any, name_of: Callable[[int], Any]) -> Any:
    """The name of a class by its number, or of each in a list; None for -1, which is no class."""
    if isinstance(value, list):
        return [_class_name(each, name_of) for each in value]
    return None if value is None or value < 0 else name_of(value)


__all__ = ["FORMATS", "Table", "is_table", "read_table"]
