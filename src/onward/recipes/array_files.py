"""Files of arrays by name, a row per sample: .npz, and the tables of `tables.py`."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from onward.errors import one_line
from onward.recipes.options import InputError
from onward.recipes.tables import read_table

Arrays = dict[str, np.ndarray]


def read_arrays(path: Path, option: str) -> Arrays:
    """Reads arrays of equally many rows. Raises InputError, with the place, where a file has none
    or rows of several shapes."""
    where = f"in --{option}"
    found = _of_npz(path, where) if path.suffix.lower() == ".npz" else _of_table(path, option)
    rows = {name: len(array) for name, array in found.items() if array.ndim}
    single = [name for name, array in found.items() if not array.ndim]
    if single or len(set(rows.values())) != 1:
        said = ", ".join(f"{name} {n}" for name, n in rows.items()) or "none"
        raise InputError(
            f"arrays have other numbers of rows ({said})"
            if not single
            else f"{single[0]} is one number",
            f"in {str(path)!r}",
            "give each a row per sample",
        )
    if not next(iter(rows.values())):
        raise InputError(f"{str(path)!r} has no row", where, "name a file with samples")
    return found


def _of_npz(path: Path, where: str) -> Arrays:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(
            f"{str(path)!r} is no .npz of plain arrays ({one_line(str(error), 120)})", where,
            "write it by numpy.savez",
        ) from error  # fmt: skip


def _of_table(path: Path, option: str) -> Arrays:
    table = read_table(path, option)
    found: Arrays = {}
    for name in table.rows[0]:
        values = [row.get(name) for row in table.rows]
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


def _differs(value: object, first: object) -> bool:
    """Whether a row has another form than the first one."""
    try:
        return np.shape(value) != np.shape(first) or np.asarray(value).dtype.kind not in "fiub"  # type: ignore[arg-type]
    except ValueError:
        return True


__all__ = ["Arrays", "read_arrays"]
