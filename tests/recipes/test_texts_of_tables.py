"""Language models are trained on the documents of a table's column, as on files of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.recipes.describe import describe
from onward.recipes.options import FinetuneConfig, InputError

TEXTS = [
    "def first(self, value):\n    return self.table[value]\n" * 9,
    'A sentence of words, "quoted", and a comma.\n' * 9,
    "  \n",  # says nothing, and is left out
    "class Last:\n\tnumber = 7\n" * 20,
]
TASKS = ["causal-lm", "masked-lm", "text-denoising", "bert-pretraining"]


def written(folder: Path, kind: str, name: str = "text") -> Path:
    rows = [{"id": i, name: text} for i, text in enumerate(TEXTS)]
    path = folder / f"t.{kind}"
    if kind in ("jsonl", "json"):
        lines = [json.dumps(row) for row in rows]
        path.write_text(f"[{','.join(lines)}]" if kind == "json" else "\n".join(lines))
    elif kind == "csv":
        quoted = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
        body = "\n".join(f"{i},{text}" for i, text in enumerate(quoted))
        path.write_text(f"id,{name}\n{body}\n")
    elif kind == "parquet":
        pytest.importorskip("pyarrow")
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def config_of(path: Path, **options: Any) -> FinetuneConfig:
    given: dict[str, Any] = {"vocab_size": 320, "block_size": 16, "max_steps": 1}
    return FinetuneConfig(train_file=str(path), **{**given, **options})


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved"])
def test_documents_of_every_kind_of_table(kind: str, tmp_path: Path) -> None:
    run = describe(config_of(written(tmp_path, kind), per_device_train_batch_size=2))
    tokenizer = run.tokenizer
    want: list[int] = []
    for text in (text for text in TEXTS if text.strip()):
        want += [tokenizer.eos_token_id] if want else []
        want += tokenizer(text, add_special_tokens=False)["input_ids"]
    found = np.concatenate([run.job.train.blocks.reshape(-1), run.job.eval.blocks.reshape(-1)])
    assert found.tolist() == want[: len(found)] and len(want) - len(found) < 16
    assert run.train_tokens == len(want)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_on_text_reads_tables(task: str, tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl", "body")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps(row) for row in rows * 6))
    options: dict[str, Any] = {"task": task, "text_column": "body"}
    run = describe(config_of(path, **options, per_device_train_batch_size=1))
    assert len(run.sources[0].documents) == 18
    with pytest.raises(InputError, match="there is no column 'text' or 'content' or 'document'"):
        describe(config_of(path, task=task))


def test_a_text_has_no_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("some words\n" * 90)
    for config in (config_of(path, text_column="text"), FinetuneConfig(text_column="text")):
        with pytest.raises(InputError, match="a text has no columns, in --text_column"):
            describe(config)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"text": 1.5}', None),
        ('{"text": null}', "column 'text' has nothing"),
        ('{"text": ["a"]}', "column 'text' has"),
        ('{"body": "a"}', "column 'text' is missing"),
        ('{"text": "a"', "invalid JSON"),
    ],
)
def test_bad_rows_are_named(row: str, said: str | None, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps({'text': TEXTS[0]})}\n{row}\n")
    config = config_of(path, per_device_train_batch_size=1)
    if said is None:
        assert "1.5" in describe(config).sources[0].documents
        return
    with pytest.raises(InputError) as raised:
        describe(config)
    assert said in str(raised.value) and "t.jsonl, line 2" in str(raised.value)


def test_a_table_without_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": " "}\n{"text": ""}\n')
    with pytest.raises(InputError, match="column 'text' has no text"):
        describe(config_of(path))


def test_a_folder_of_no_dataset_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a file"):
        describe(config_of(tmp_path))
