"""Files of arrays by name, a row per sample: .npz, and the tables of `tables.py`."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import one_line
from onward.recipes.options import InputError
from onward.recipes.tables import SEPARATORS, Table, read_table

Arrays = dict[str, np.ndarray]


class ArrayFile:
    """A file of arrays. An array is looked at when it is asked for: others may hold texts.

    path: the file. names: of its arrays. is_table: whether they are columns of a table, in which a
    whole number may stand for a float.
    """

    def __init__(self, path: Path, names: Sequence[str], table: Table | None, where: str) -> None:
        self.path, self.names = path, tuple(names)
        self.is_table = table is not None
        self._table, self._where = table, where
        self._read: Arrays = {}

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def arrays(self, names: Sequence[str]) -> Arrays:
        """The arrays of these names. Raises InputError, with the place, where one has rows of
        several shapes, and where they have other numbers of rows."""
        new = [name for name in names if name not in self._read]
        self._read |= self._of_npz(new) if self._table is None else self._of_table(self._table, new)
        found = {name: self._read[name] for name in names}
        rows = {name: len(array) for name, array in found.items() if array.ndim}
        single = [name for name, array in found.items() if not array.ndim]
        if single or len(set(rows.values())) != 1:
            said = ", ".join(f"{name} {n}" for name, n in rows.items()) or "none"
            raise InputError(
                f"arrays differ in their numbers of rows ({said})"
                if not single
                else f"{single[0]} is one number",
                f"in {str(self.path)!r}",
                "give each a row per sample",
            )
        if not next(iter(rows.values())):
            raise InputError(
                f"{str(self.path)!r} has no row", self._where, "name a file with samples"
            )
        return found

    def _of_npz(self, names: Sequence[str]) -> Arrays:
        try:
            with self.path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                return {name: np.asarray(file[name]) for name in names}
        except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
            raise _no_npz(self.path, self._where, error) from error

    def _of_table(self, table: Table, names: Sequence[str]) -> Arrays:
        is_text = self.path.suffix.lower() in SEPARATORS
        found: Arrays = {}
        for name in names:
            values = [row.get(name) for row in table.rows]
            values = [_cell(value) for value in values] if is_text else values
            try:
                array = np.array(values)
            except ValueError:  # rows of other lengths
                array = np.array(None)
            if array.dtype.kind not in "fiub":
                number = next((i for i, v in enumerate(values) if _differs(v, values[0])), 0)
                raise InputError(
                    f"column {name!r} is no array of numbers with rows of one shape",
                    table.where(number),
                    "pad rows to one length, and write numbers alone",
                )
            found[name] = array
        return found


def read_arrays(path: Path, option: str) -> ArrayFile:
    """Opens a file of arrays. Raises InputError, with the place, for what is none."""
    where = f"in --{option}"
    if path.suffix.lower() != ".npz":
        table = read_table(path, option)
        return ArrayFile(path, list(table.rows[0]), table, where)
    try:
        with path.open("rb") as raw:
            file: Any = np.load(raw, allow_pickle=False)
            if not hasattr(file, "files"):
                raise ValueError("one array without a name")
            with file:
                return ArrayFile(path, file.files, None, where)
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise _no_npz(path, where, error) from error


def _no_npz(path: Path, where: str, error: Exception) -> InputError:
    return InputError(
        f"{str(path)!r} is no .npz of plain arrays ({one_line(str(error), 120)})", where,
        "write it by numpy.savez",
    )  # fmt: skip


def _cell(text: Any) -> Any:
    """The number in a cell of a table of texts, or a list of numbers as JSON; else the text."""
    if not isinstance(text, str):
        return text
    plain = text.strip()
    if plain in ("True", "False"):
        return plain == "True"
    try:
        return json.loads(plain)
    except (ValueError, RecursionError):
        pass
    try:
        return text if "_" in plain else float(plain)
    except ValueError:
        return text


def _differs(value: object, first: object) -> bool:
    """Whether a row has another form than the first one."""
    try:
        return np.shape(value) != np.shape(first) or np.asarray(value).dtype.kind not in "fiub"  # type: ignore[arg-type]
    except ValueError:
        return True


__all__ = ["ArrayFile", "Arrays", "read_arrays"]
