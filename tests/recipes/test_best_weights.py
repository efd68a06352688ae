"""The best evaluation of a run: its weights at the end, and the end of runs without better ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onward.checkpoint import checkpoints
from onward.cli import main
from onward.recipes.best_weights import BestWeights
from onward.recipes.options import FinetuneConfig, InputError, check_options

NARROW = "hidden_size=32,num_attention_heads=2,intermediate_size=48,num_hidden_layers=1"


def words(tmp_path: Path, *more: str, out: str = "out") -> list[str]:
    """Labels of the two files are opposite, so that evaluations become worse by training."""
    for name, flip in (("train", 0), ("held", 1)):
        rows = [{"text": "ab"[n % 2] * 5, "label": "xy"[(n + flip) % 2]} for n in range(16)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return [
        "finetune", "--task", "text-classification", "--train_file", str(tmp_path / "train.jsonl"),
        "--validation_file", str(tmp_path / "held.jsonl"), "--vocab_size", "300",
        "--config_overrides", NARROW, "--max_steps", "12", "--per_device_train_batch_size", "4",
        "--dropout", "0.1", "--learning_rate", "3e-3", "--eval_strategy", "steps", "--eval_steps",
        "2", "--output_dir", str(tmp_path / out), *more,
    ]  # fmt: skip


def evaluations(folder: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "eval_loss" in line}


@pytest.mark.parametrize("engine", ["onward", "torch"])
def test_a_run_ends_with_its_best_weights(engine: str, tmp_path: Path) -> None:
    more = ("--load_best_model_at_end", "--save_total_limit", "1", "--engine", engine)
    assert main(words(tmp_path, *more)) == 0
    out = tmp_path / "out"
    found = evaluations(out)
    assert sorted(found) == [2, 4, 6, 8, 10, 12]
    best = min(found, key=lambda step: found[step]["eval_loss"])
    assert best < 12, "the labels are opposite"
    kept = {found.path.name for found in checkpoints(out)}
    assert kept == {f"checkpoint-{best}", "checkpoint-12"}
    weights = load_file(out / "model.safetensors")
    saved = load_file(out / f"checkpoint-{best}" / "model.safetensors")
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in weights)
    results = json.loads((out / "eval_results.json").read_text())
    assert results["eval_loss"] == pytest.approx(found[best]["eval_loss"], rel=1e-6)


def test_a_run_without_better_evaluations_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path, "--early_stopping_patience", "2")) == 0
    out = tmp_path / "out"
    found = evaluations(out)
    best = min(found, key=lambda step: found[step]["eval_loss"])
    assert max(found) == best + 4 < 12
    assert f"end the run after update {best + 4}" in capsys.readouterr().err
    results = json.loads((out / "eval_results.json").read_text())
    assert results["eval_loss"] == pytest.approx(found[best + 4]["eval_loss"], rel=1e-6)
    assert checkpoints(out)[0].path.name == f"checkpoint-{best + 4}"
    # stopped before its results were written, it trains no further
    (out / "eval_results.json").unlink()
    assert main(words(tmp_path, "--early_stopping_patience", "2")) == 0
    assert sorted(evaluations(out)) == sorted(found)
    again = json.loads((out / "eval_results.json").read_text())
    assert again["eval_loss"] == results["eval_loss"]


def test_a_run_that_goes_on_has_the_same_best_weights(tmp_path: Path) -> None:
    more = ("--load_best_model_at_end", "--early_stopping_patience", "3", "--save_steps", "3")
    assert main(words(tmp_path, *more)) == 0
    whole = (tmp_path / "out" / "model.safetensors").read_bytes()
    found = evaluations(tmp_path / "out")
    for path in (tmp_path / "out").glob("checkpoint-*"):
        if int(path.name.partition("-")[2]) > 6:
            shutil.rmtree(path)
    for name in ("eval_results.json", "model.safetensors"):
        (tmp_path / "out" / name).unlink()
    assert main(words(tmp_path, *more)) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole
    assert evaluations(tmp_path / "out").keys() == found.keys()


def test_a_score_decides_where_it_is_named(tmp_path: Path) -> None:
    more = ("--load_best_model_at_end", "--metric_for_best_model", "accuracy")
    assert main(words(tmp_path, *more)) == 0
    found = evaluations(tmp_path / "out")
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert results["accuracy"] == max(line["eval_accuracy"] for line in found.values())


def test_the_direction_follows_the_name() -> None:
    for name, greater in [
        (None, False), ("eval_loss", False), ("perplexity", False), ("mse", False),
        ("pretraining_loss", False), ("accuracy", True), ("eval_f1", True), ("rougeL", True),
    ]:  # fmt: skip
        assert BestWeights(FinetuneConfig(metric_for_best_model=name)).greater is greater
    told = FinetuneConfig(metric_for_best_model="accuracy", greater_is_better=False)
    assert not BestWeights(told).greater


def test_an_unknown_score_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--early_stopping_patience", "2", "--metric_for_best_model", "acuracy")
    assert main(words(tmp_path, *more)) == 2
    told = capsys.readouterr().err
    assert "no eval_acuracy" in told and "eval_accuracy" in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"metric_for_best_model": "f1"}, "metric_for_best_model without a best evaluation"),
        ({"greater_is_better": False}, "greater_is_better without a best evaluation"),
        ({"load_best_model_at_end": True}, "needs evaluations"),
        ({"early_stopping_patience": 2}, "needs evaluations"),
        ({"early_stopping_patience": 0, "eval_strategy": "epoch"}, "early_stopping_patience is 0"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "no"},
         "kept in a checkpoint"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch", "compare": True}, "engines"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        check_options(FinetuneConfig(**options))
