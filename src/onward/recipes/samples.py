"""Samples of a run as numbers, by columns, so that another process can read and hash them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

Numbers = NDArray[Any]
Row = dict[str, Any]
_STARTS, _BESIDE = ".starts", ".beside"


class Samples(Dataset[Row]):
    """Encoded samples. A row has one value for each column: a number, or a list of numbers.

    columns: an array `[samples]` has one number a sample, an array `[samples, T]` rows of one
    length. starts: for columns whose rows differ in length, `i64[samples+1]`: sample i has the
    values from starts[i] to starts[i+1] of that column. beside: arrays that all samples are drawn
    from, such as the tokens of a text; they may lie in files.
    """

    def __init__(
        self,
        columns: Mapping[str, Numbers],
        starts: Mapping[str, Numbers] | None = None,
        beside: Mapping[str, Numbers] | None = None,
    ) -> None:
        self.columns, self.starts = dict(columns), dict(starts or {})
        self.beside = dict(beside or {})
        sizes = {
            len(self.starts[name]) - 1 if name in self.starts else len(values)
            for name, values in self.columns.items()
        }
        if len(sizes) > 1:
            raise ValueError(f"columns of {sorted(sizes)} samples")
        self._size = sizes.pop() if sizes else 0

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Samples:
        """Samples of rows that have the same names; lists of numbers may differ in length."""
        columns: dict[str, Numbers] = {}
        starts: dict[str, Numbers] = {}
        for name in rows[0] if rows else ():
            values = [row[name] for row in rows]
            if isinstance(values[0], int | float):
                columns[name] = _narrow(np.array(values))
                continue
            lengths = np.array([len(value) for value in values], dtype=np.int64)
            starts[name] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
            flat = [np.asarray(value) for value in values if len(value)]
            columns[name] = _narrow(np.concatenate(flat) if flat else np.empty(0, np.int32))
        return cls(columns, starts)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:
        return {name: self._value(name, index) for name in self.columns}

    def _value(self, name: str, index: int) -> Any:
        values = self.columns[name]
        if name in self.starts:
            first, end = self.starts[name][index : index + 2]
            return values[first:end].tolist()
        return values[index].item() if values.ndim == 1 else values[index]

    def __iter__(self) -> Any:
        return (self[index] for index in range(self._size))

    def first(self, count: int | None) -> Samples:
        """The first `count` samples; None: all."""
        if count is None or count >= self._size:
            return self
        columns = {
            name: values[: self.starts[name][count] if name in self.starts else count]
            for name, values in self.columns.items()
        }
        starts = {name: at[: count + 1] for name, at in self.starts.items()}
        return Samples(columns, starts, self.beside)

    def chosen(self, indices: Numbers) -> Samples:
        """The samples at these indices, in this order."""
        if not self.starts:
            columns = {name: values[indices] for name, values in self.columns.items()}
            return Samples(columns, None, self.beside)
        made = Samples.of_rows([self[int(index)] for index in indices])
        return Samples(made.columns, made.starts, self.beside)

    def lengths(self, name: str = "input_ids") -> Numbers:
        """The number of values of each sample in a column, i64[samples]."""
        if name in self.starts:
            return np.diff(self.starts[name])
        values = self.columns[name]
        return np.full(self._size, values.shape[1] if values.ndim > 1 else 1, dtype=np.int64)

    def token_ids(self) -> list[Numbers]:
        """All arrays of tokens, i32[n] or i32[samples,T]; none where samples are images."""
        own = [a for n, a in self.columns.items() if n.partition(".")[0] == "input_ids"]
        beside = [self.beside["tokens"]] if "tokens" in self.beside else []
        texts = [a for n, a in self.columns.items() if n in self.starts and n[0] != "_"]
        return own or beside or texts

    @property
    def blocks(self) -> NDArray[np.int32]:
        """The tokens of samples that have one length, i32[samples,T]."""
        return self.columns["input_ids"]

    def sha256(self) -> str:
        """The SHA-256 of names, types and bytes."""
        digest = hashlib.sha256()
        for name in sorted([*self.columns, *self.beside]):
            for array in (self.columns.get(name), self.starts.get(name), self.beside.get(name)):
                if array is not None:
                    digest.update(f"{name}{array.dtype.str}{array.shape}".encode())
                    digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Writes the samples for another process, as a `.npz` of plain arrays."""
        named = {f"{name}{_STARTS}": array for name, array in self.starts.items()}
        named |= {f"{name}{_BESIDE}": array for name, array in self.beside.items()}
        np.savez(path, allow_pickle=False, **self.columns, **named)  # pyright: ignore

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        kinds = (_STARTS, _BESIDE)
        columns = {name: a for name, a in arrays.items() if not name.endswith(kinds)}
        beside = {n.removesuffix(_BESIDE): a for n, a in arrays.items() if n.endswith(_BESIDE)}
        starts = {n.removesuffix(_STARTS): a for n, a in arrays.items() if n.endswith(_STARTS)}
        return cls(columns, starts, beside)


def _narrow(values: Numbers) -> Numbers:
    """The values in 4 bytes each."""
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int32)


__all__ = ["Row", "Samples"]
