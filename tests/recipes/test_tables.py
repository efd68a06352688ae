"""Tables of examples: every format gives the same rows, and a bad row is named by its line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from onward.recipes.options import InputError
from onward.recipes.tables import Table, read_table

ROWS = [
    {"text": "one, two", "label": "a"},
    {"text": 'a "word"\nin two lines', "label": "b"},
    {"text": "caf\u00e9", "label": "a"},
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(
                stream, list(rows[0]), delimiter="," if path.suffix == ".csv" else "\t"
            )
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl", "t.json", "t.parquet", "folder"])
def test_every_format_has_the_same_rows(name: str, tmp_path: Path) -> None:
    table = read_table(written(tmp_path / name, ROWS), "train_file")
    assert list(table.rows) == ROWS
    again = read_table(tmp_path / name, "train_file")
    assert again.sha256 == table.sha256 and len(table) == sum(len(t) for t in table.documents)


def test_classes_of_a_dataset_are_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "tags": datasets.Sequence(datasets.ClassLabel(names=["O", "B-X"])),
        }
    )
    rows = [{"text": "a", "label": 1, "tags": [0, 1]}, {"text": "b", "label": 0, "tags": []}]
    datasets.Dataset.from_list(rows, features).save_to_disk(tmp_path / "d")
    found = read_table(tmp_path / "d", "train_file").rows
    assert [row["label"] for row in found] == ["yes", "no"]
    assert [row["tags"] for row in found] == [["O", "B-X"], []]
    split = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows, features)})
    split.save_to_disk(tmp_path / "splits")
    with pytest.raises(InputError, match="several splits"):
        read_table(tmp_path / "splits", "train_file")


def test_classes_that_are_none_are_told_apart(tmp_path: Path) -> None:
    """A list may be missing, or have a class that is missing; lists lie within lists."""
    datasets = pytest.importorskip("datasets")
    kind = datasets.ClassLabel(names=["O", "B-X"])
    features = datasets.Features(
        {"tags": datasets.List(kind), "deep": datasets.List(datasets.List(kind))}
    )
    rows = [
        {"tags": [0, 1], "deep": [[1], [0]]}, {"tags": None, "deep": None},
        {"tags": [1, -1], "deep": [[], None]}, {"tags": [None, 0], "deep": [[-1]]},
    ]  # fmt: skip
    datasets.Dataset.from_list(rows, features).save_to_disk(tmp_path / "d")
    found = read_table(tmp_path / "d", "train_file").rows
    assert [row["tags"] for row in found] == [["O", "B-X"], None, ["B-X", None], [None, "O"]]
    assert [row["deep"] for row in found] == [[["B-X"], ["O"]], None, [[], None], [[None]]]
    odd = datasets.Dataset.from_dict({"tags": [[0], [7]]})
    odd = odd.cast(datasets.Features({"tags": datasets.List(kind)}))
    odd.save_to_disk(tmp_path / "odd")
    with pytest.raises(InputError, match=r"'tags' has \[7\], which is none of its 2 .*, row 2"):
        read_table(tmp_path / "odd", "train_file")


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_long_texts_are_read(name: str, tmp_path: Path) -> None:
    """The csv module's own limit of a field is 131,072 characters, for all of the process."""
    rows = [{"text": "x" * 200_000, "label": "a"}, {"text": "b", "label": "y" * 140_000}]
    path, before = written(tmp_path / name, rows), csv.field_size_limit()
    assert list(read_table(path, "train_file").rows) == rows
    assert csv.field_size_limit() == before == 131_072
    path.write_text('text\n"open')
    with pytest.raises(InputError):
        read_table(path, "train_file")
    assert csv.field_size_limit() == before


BAD: dict[str, tuple[str, str, str]] = {
    "a value too few": ("t.csv", "text,label\na,b\nc\n", "1 values for 2 columns, in {}, line 3"),
    "a value too many": (
        "t.tsv", "text\tlabel\na\tb\tc\n", "3 values for 2 columns, in {}, line 2",
    ),
    "a column twice": ("t.csv", "text,text\na,b\n", "column 'text' stands twice, in {}, line 1"),
    "an open quote": ("t.csv", 'text,label\na,b\n"c,d\n', "unexpected end of data, in {}, line 3"),
    "no JSON": (
        "t.jsonl", '{"text": "a"}\n\n{"text": \n', "invalid JSON: Expecting value, in {}, line 3",
    ),
    "a list": ("t.jsonl", '{"text": "a"}\n[1]\n', "not a JSON object, in {}, line 2"),
    "a column less": (
        "t.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n',
        "column 'label' is missing, in {}, line 2",
    ),
    "half a pair": (
        "t.jsonl", '{"a": "x"}\n{"a": "\\ud800"}\n', "an unpaired surrogate, in {}, line 2",
    ),
    "half a pair in a list": (
        "t.json", '[{"a": ["\\udc00"]}]', "an unpaired surrogate, in {}, element 1",
    ),
    "a number in a list": ("t.json", '[{"a": 1}, 2]', "not a JSON object, in {}, element 2"),
    "deep JSON": ("t.jsonl", "[" * 100_000 + "\n", "invalid JSON: "),
    "nothing": ("t.csv", "text,label\n", "has no row"),
    "another suffix": ("t.xlsx", "x", "has a format that is not known"),
    "no parquet": ("t.parquet", "x", "is no parquet file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_by_its_line(name: str, tmp_path: Path) -> None:
    if name == "no parquet":
        pytest.importorskip("pyarrow")
    file, text, told = BAD[name]
    path = tmp_path / file
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_table(path, "train_file")
    assert told.format(path) in str(caught.value) and "; fix: " in str(caught.value)


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"text,label\n\xff,b\n")
    with pytest.raises(InputError, match="is not UTF-8 text at byte 11"):
        read_table(tmp_path / "t.csv", "train_file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is no saved dataset"):
        read_table(tmp_path / "folder", "train_file")


def test_a_missing_column_is_told_with_those_there_are() -> None:
    table = Table("t.csv", ({"body": "a", "kind": 1},), "x", (2,))
    with pytest.raises(InputError) as caught:
        table.column(None, ["text", "sentence"], "text_column")
    assert str(caught.value) == (
        "there is no column 'text' or 'sentence' (but 'body', 'kind'), in t.csv; "
        "fix: name the column with --text_column"
    )
    with pytest.raises(
        InputError, match=r"column 'kind' has 1, in t\.csv, line 2; fix: give a text"
    ):
        table.value(0, "kind", str, "a text")
