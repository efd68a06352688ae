"""Options in a YAML file and in the environment, below those of the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from onward.cli import main, parse
from onward.recipes.options import FinetuneConfig

OPTIONS: dict[str, Any] = {
    "model_name_or_path": "gpt2-small", "max_steps": 7, "learning_rate": 5e-5, "bf16": True,
    "compare": False, "dropout": None, "report_to": "tensorboard,mlflow", "memory_budget": "2GB",
    "run_name": "null and void: #1", "warmup_ratio": 0.1, "seed": 0,
}  # fmt: skip


def parsed(*words: str) -> FinetuneConfig:
    found = parse(list(words), "finetune", FinetuneConfig)
    assert found is not None
    return found


def test_a_file_says_what_the_command_line_says(tmp_path: Path) -> None:
    """PyYAML and JSON write options of every kind."""
    want = FinetuneConfig(**OPTIONS)
    whole = dataclasses.asdict(FinetuneConfig())
    for name, text in (
        ("a.yaml", yaml.safe_dump(OPTIONS)), ("b.json", json.dumps(OPTIONS)),
        ("c.yaml", yaml.safe_dump({**whole, **OPTIONS})),
        ("d.yaml", yaml.safe_dump({n.replace("_", "-"): v for n, v in OPTIONS.items()})),
    ):  # fmt: skip
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert parsed("--config", str(tmp_path / name)) == want, name


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("learning_rate: 5e-5", "learning_rate", 5e-5),
        ("learning_rate: .5", "learning_rate", 0.5),
        ("bf16: true", "bf16", True),
        ("dropout: ~", "dropout", None),
        ("dropout:", "dropout", None),
        ("report_to: [tensorboard, mlflow]", "report_to", "tensorboard,mlflow"),
        ("report_to:\n- wandb\n- mlflow", "report_to", "wandb,mlflow"),
        ("model: &m gpt2-small\nrun_name: *m", "run_name", "gpt2-small"),
        ("run_name: \"12\"", "run_name", "12"),
        ("run_name: 2026-11-28", "run_name", "2026-11-28"),
        ("train_data_file: a.txt", "train_file", "a.txt"),
        ("seed: 3 # the third", "seed", 3),
    ],
)  # fmt: skip
def test_spellings_of_yaml(text: str, name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    found = getattr(parsed("--config", str(tmp_path / "run.yaml")), name)
    assert found == value and type(found) is type(value)


def test_the_order_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("seed: 1\nmax_steps: 2\nblock_size: 3\n")
    monkeypatch.setenv("ONWARD_FINETUNE_SEED", "4")
    monkeypatch.setenv("ONWARD_FINETUNE_MAX_STEPS", "5")
    monkeypatch.setenv("ONWARD_VERIFY_BLOCK_SIZE", "99")
    found = parsed("--seed", "6", "--config", str(tmp_path / "run.yaml"))
    assert (found.seed, found.max_steps, found.block_size) == (6, 5, 3)
    assert parsed().seed == 4
    monkeypatch.setenv("ONWARD_FINETUNE_SEED", "")
    assert parsed().seed == FinetuneConfig().seed, "empty is unset"


def test_switches_of_others_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("do_train: true\nconfig_name: gpt2-small\n")
    assert parsed("--config", str(tmp_path / "run.yaml")).model_name_or_path == "gpt2-small"
    assert "--do_train changes nothing" in capsys.readouterr().err
    words = ["--config", str(tmp_path / "run.yaml"), "--config_name", "gpt2-medium"]
    assert parsed(*words).model_name_or_path == "gpt2-medium", "the command line is over the file"
    (tmp_path / "run.yaml").write_text("mlm: true\n")
    assert parsed("--config", str(tmp_path / "run.yaml"), "--mlm", "false") == FinetuneConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_step: 3", "unknown option max_step, in run.yaml, line 1; fix: did you mean max_ste"),
        ("seed: 1\n\nblock_sise: 3", "unknown option block_sise, in run.yaml, line 3; fix: did"),
        ("seed: 1\nseed: 2", "option seed twice, in run.yaml, line 2; fix: give it once"),
        ("train_file: a\ntrain_data_file: b", "option train_data_file twice, in run.yaml, line 2"),
        ("seed: one", "seed is 'one', in run.yaml, line 1; fix: give a whole number"),
        ("bf16: perhaps", "bf16 is 'perhaps', in run.yaml, line 1; fix: give true or false"),
        ("seed: {a: 1}", "the value of 'seed' is no text, number, true, false or null, in run.y"),
        ("report_to: [[a]]", "the value of 'report_to' is no text"),
        ("report_to: [{a: b}]", "the value of 'report_to' is no text"),
        ("? [seed]\n: 1", "a name is no text"),
        ("- seed", "'run.yaml' has no options, in --config; fix: write one name: value a line"),
        ("seed", "'run.yaml' has no options"),
        ("seed: [1", "'run.yaml' is no YAML ("),
        ("seed: 1\n\tmax_steps: 2", "'run.yaml' is no YAML ("),
        ("a: &a [*a, *a]", "is no text"),
        ("run_name: !!python/name:os.system x", "the value of 'run_name' is no text"),
        ("run_name: !!binary aGVsbG8=", "the value of 'run_name' is no text"),
        ("mlm: true", "--mlm is not supported: what is learnt is a task"),
        ("config: other.yaml", "unknown option config, in run.yaml, line 1"),
        ("max_steps: 0", "max_steps is 0"),
        ("x" * (1 << 20) + ": 1", "'run.yaml' is over 1 MiB"),
        ("[" * 5000, "'run.yaml' is no YAML (it nests too deep)"),
    ],
    ids=lambda text: text[:24],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(text, encoding="utf-8")
    assert main(["finetune", "--config", "run.yaml"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line and "; fix: " in line
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"seed: \xe9", b"\x00"])
def test_bytes_that_are_no_text_are_refused(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    assert main(["finetune", "--config", str(tmp_path / "run.yaml")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "in --config; fix: " in line


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        assert main(["finetune", "--config", str(path)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "cannot read" in line and "in --config; fix: name a YAML file" in line
    assert main(["finetune", "--config"]) == 2
    assert "option --config has no value" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MAX_STEP", "3", "unknown option max_step, in the variable ONWARD_FINETUNE_MAX_STEP; fix"),
        ("SEED", "one", "seed is 'one', in the variable ONWARD_FINETUNE_SEED; fix: give a whole"),
        ("MAX_STEPS", "0", "max_steps is 0"),
        ("MLM", "true", "--mlm is not supported"),
    ],
)
def test_a_variable_that_is_wrong_is_refused_in_one_line(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(f"ONWARD_FINETUNE_{name}", value)
    assert main(["finetune"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


def test_help_names_the_sources(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("finetune", "verify", "explain", "simulate"):
        assert main([verb, "--help"]) == 0
        assert "--config" in capsys.readouterr().out
