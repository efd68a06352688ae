"""`onward config`: values with their sources, the schema, and files that are refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from onward.cli import main
from onward.recipes.config_options import schema
from onward.recipes.options import CONDITIONS, FinetuneConfig
from onward.recipes.switches import RENAMED

FIELDS = {field.name: field for field in dataclasses.fields(FinetuneConfig)}


def test_each_value_has_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# a run\nseed: 1\n\nmodel: gpt2-small\nmax_steps: 2\nblock-size: 3\n")
    monkeypatch.setenv("ONWARD_FINETUNE_SEED", "4")
    words = ["config", "show", "--config", str(file), "--max_steps", "6"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(FIELDS)
    assert {n: (f["value"], f["source"]) for n, f in found.items() if f["source"] != "default"} == {
        "model_name_or_path": ("gpt2-small", "file"),
        "seed": (4, "environment"),
        "max_steps": (6, "command line"),
        "block_size": (3, "file"),
    }
    assert found["block_size"]["where"] == f"{file}, line 6"
    assert found["seed"]["where"] == "variable ONWARD_FINETUNE_SEED"
    usual = FinetuneConfig(model_name_or_path="gpt2-small")
    assert all(
        f["value"] == getattr(usual, n) for n, f in found.items() if f["source"] == "default"
    )
    assert main(words) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["block_size"].split()[1:] == ["3", f"{file},", "line", "6"]
    assert lines["bf16"].split()[1:] == ["false", "default"]


def test_a_conflict_is_told_with_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("bf16: true\n")
    monkeypatch.setenv("ONWARD_FINETUNE_FP16", "true")
    assert main(["config", "show", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"in {file}, line 1 and in the variable ONWARD_FINETUNE_FP16; fix: " in error


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("seed: 1\nlerning_rate: 1", 2, "lerning_rate", ),
        ("seed: 1\nlerning_rate: 1", 2, "did you mean learning_rate?"),
        ("seed: 1\n\nblock-size: 1", 3, "block-size: block_size is 1"),
        ("max_steps: many", 1, "max_steps is 'many'"),
        ("eval_steps: 5", 1, "add --eval_strategy steps"),
        ("eval_file: missing.txt", 1, "no such file 'missing.txt'"),
        ("seed: 1\nseed: 2", 2, "option seed twice"),
        ("mlm: true", 1, "--mlm is not supported"),
    ],
)  # fmt: skip
def test_a_file_is_refused_by_its_line(
    text: str, line: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert main(["config", "validate", str(tmp_path / "run.yaml")]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert f"in {tmp_path / 'run.yaml'}, line {line};" in told.err and said in told.err


def test_validation_looks_at_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("bf16: true\nseed: 1\n")
    monkeypatch.setenv("ONWARD_FINETUNE_FP16", "true")
    assert main(["config", "validate", str(tmp_path / "run.yaml")]) == 0
    assert capsys.readouterr().out.endswith("2 options of onward finetune, all valid\n")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ([], "fix: onward config show"),
        (["shema"], "did you mean schema?"),
        (["validate"], "name one YAML file"),
        (["schema", "run.yaml"], "leave it out"),
        (["show", "--sede", "1"], "did you mean --seed?"),
    ],
)
def test_words_that_are_none(
    words: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *words]) == 2
    assert fix in capsys.readouterr().err


# ---- the schema


def accepts(about: dict[str, Any], value: Any) -> bool:
    """Whether one keyword set of the schema, as those of an option are, accepts a value."""
    if "anyOf" in about:
        return any(accepts(each, value) for each in about["anyOf"])
    if "enum" in about:
        return value in about["enum"]
    kinds = {
        "integer": lambda v: type(v) is int, "number": lambda v: type(v) in (int, float),
        "boolean": lambda v: type(v) is bool, "string": lambda v: type(v) is str,
        "null": lambda v: v is None, "array": lambda v: type(v) is list,
    }  # fmt: skip
    bounds = {
        "minimum": lambda v, b: v >= b, "exclusiveMinimum": lambda v, b: v > b,
        "maximum": lambda v, b: v <= b, "exclusiveMaximum": lambda v, b: v < b,
    }  # fmt: skip
    return kinds[about["type"]](value) and all(
        holds(value, about[name]) for name, holds in bounds.items() if name in about
    )


def test_the_schema_has_every_option_and_its_default() -> None:
    found = schema()["properties"]
    assert list(found) == [*FIELDS, *RENAMED]
    for name, field in FIELDS.items():
        assert found[name]["description"] == field.metadata["help"]
        assert found[name]["default"] == getattr(FinetuneConfig(), name)
        assert accepts(found[name], found[name]["default"]), name
    assert found["model"]["$ref"] == "#/properties/model_name_or_path"


def test_bounds_of_the_schema_are_the_conditions() -> None:
    """Numbers on both sides of each bound."""
    found, bounded = schema()["properties"], 0
    for name, holds, _ in CONDITIONS:
        kinds = [k["type"] for k in found.get(name, {}).get("anyOf", [found.get(name, {})]) if k]
        if name in ("memory_budget", "samples") or not {"integer", "number"} & {*kinds}:
            continue
        whole = "integer" in kinds
        tried = [-1, 0, 1, 2, 256, 257, 2**32 - 1, 2**32]
        for value in tried if whole else [*tried, -0.5, 0.5, 0.999, 1.001]:
            assert accepts(found[name], value) == holds(value), (name, value)
        bounded += 1
    assert bounded > 20


VALUES = [None, True, False, 0, 1, 3, -1, 0.5, "steps", "a text", "linear", math.pi]


def test_what_the_schema_accepts_the_command_line_accepts(tmp_path: Path) -> None:
    """Every option in one file, each with the first value that its schema takes, then the second,
    and so on."""
    from onward.cli import parse

    file, found = tmp_path / "run.yaml", schema()["properties"]
    taken = {
        name: [getattr(FinetuneConfig(), name), *(v for v in VALUES if accepts(found[name], v))]
        for name in FIELDS
    }
    assert len(taken["seed"]) == 4
    for number in range(max(map(len, taken.values()))):
        want = {name: values[number % len(values)] for name, values in taken.items()}
        file.write_text(yaml.safe_dump(want))
        got = parse(["--config", str(file)], "finetune", FinetuneConfig)
        assert got == FinetuneConfig(**want)


def test_the_schema_is_one_and_says_what_goes_together() -> None:
    if importlib.util.find_spec("jsonschema") is None:
        pytest.skip("jsonschema is not installed")
    from jsonschema import Draft202012Validator  # type: ignore[import-not-found]

    Draft202012Validator.check_schema(schema())
    judge = Draft202012Validator(schema())
    for text, valid in (
        ("seed: 3\nmodel: gpt2-small\nreport_to: [wandb, mlflow]", True),
        ("lerning_rate: 1", False), ("seed: -1", False), ("model: 3", False), ("bf16: 1", False),
        ("bf16: true\nfp16: true", False), ("bf16: true\nfp16: false", True),
        ("eval_steps: 3", False), ("eval_steps: 3\neval_strategy: steps", True),
        ("eval_steps: null", True), ("validation_file: a", False),
        ("validation_file: a\ntrain_file: b", True), ("warmup_ratio: 0.1\nwarmup_steps: 3", False),
        ("memory_budget: 1GB\ngradient_checkpointing: true", False),
    ):  # fmt: skip
        assert judge.is_valid(yaml.safe_load(text)) == valid, text


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    code = (
        "import sys; from onward.cli import main\n"
        "assert main(['config', 'show']) == main(['config', 'schema']) == 0\n"
        f"assert main(['config', 'validate', {str(tmp_path / 'run.yaml')!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
