"""Switches of `onward finetune` that Hugging Face's examples have too, against transformers and
eager PyTorch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from onward.cli import main
from onward.recipes.describe import describe
from onward.recipes.loop import train
from onward.recipes.options import FinetuneConfig

SMALL = {
    "vocab_size": 320, "block_size": 32, "max_steps": 6, "per_device_train_batch_size": 4,
    "max_eval_samples": 2, "save_strategy": "no", "config_overrides": "n_layer=1,n_embd=64",
}  # fmt: skip


def config_of(text_file: Path, **options: object) -> FinetuneConfig:
    given = {"train_file": str(text_file), **SMALL, **options}
    return FinetuneConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ratio", "steps"), [(0.06, 50), (0.1, 7), (0.5, 3), (0.99, 4), (0.0, 9)])
def test_a_share_of_the_updates_warms_up(ratio: float, steps: int, text_file: Path) -> None:
    config = config_of(text_file, warmup_ratio=ratio, max_steps=steps)
    given = TrainingArguments("unused", use_cpu=True, warmup_steps=ratio, report_to="none")
    assert describe(config).job.config.warmup_steps == given.get_warmup_steps(steps)


def test_the_first_blocks_are_trained(text_file: Path) -> None:
    whole, part = (
        describe(config_of(text_file, max_train_samples=n)).job.train.blocks for n in (None, 9)
    )
    assert len(part) == 9 and (part == whole[:9]).all()


def test_values_of_the_configuration(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = "n_layer=3,n_embd=96,n_head=6,n_positions=40"
    options = ["--train_file", str(text_file), "--vocab_size", "320", "--block_size", "32"]
    assert main(["finetune", *options, "--config_overrides", given, "--dry_run"]) == 0
    said = capsys.readouterr().out
    made = GPT2Config(n_layer=3, n_embd=96, n_head=6, n_positions=40, vocab_size=320)
    assert f" {GPT2LMHeadModel(made).num_parameters() / 1e6:.2f} M parameters" in said
    assert json.loads(said[said.index("{") :])["config_overrides"] == given


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--config_overrides", "n_layers=3"], "key n_layers isn't in the original config dict"),
        (["--config_overrides", "n_layer=1,n_embd"], "('n_embd' is no name=value), in --config_o"),
        (["--config_overrides", "n_layer=two"], "config_overrides is 'n_layer=two'"),
        (["--config_overrides", "n_positions=16"], "block_size 32 is over the model's 16 pos"),
        (["--config_overrides", "n_layer=1", "--model", "FOLDER"], "for a model from scratch"),
        (["--warmup_ratio", "0.1", "--warmup_steps", "3"], "warmup_ratio and warmup_steps tog"),
        (["--warmup_ratio", "1.5"], "warmup_ratio is 1.5"),
        (["--adam_beta1", "1"], "adam_beta1 is 1.0"),
        (["--adam_beta2", "-0.1"], "adam_beta2 is -0.1"),
        (["--adam_epsilon", "0"], "adam_epsilon is 0.0"),
        (["--max_train_samples", "0"], "max_train_samples is 0"),
        (["--max_train_samples", "3"], "3 train blocks of 32 tokens do not fill one update of 8"),
        (["--gradient_checkpointing", "--memory_budget", "0.5"], "both say what is computed ag"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(
    options: list[str], words: str, text_file: Path, model_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = [str(model_folder) if word == "FOLDER" else word for word in options]
    base = ["--train_file", str(text_file), "--block_size", "32"]
    assert main(["finetune", *base, *given]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line and "; fix: " in line


@pytest.mark.slow
def test_both_engines_train_by_them_alike(text_file: Path, tmp_path: Path) -> None:
    """Other values of AdamW's give other losses, and both engines the same ones; computing
    activations again changes no bit."""
    own = {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "warmup_ratio": 0.5}
    losses: dict[tuple[str, str], tuple[float, ...]] = {}
    for engine in ("onward", "torch"):
        for name, options in (
            ("usual", {}), ("own", own), ("again", {**own, "gradient_checkpointing": True})
        ):  # fmt: skip
            config = config_of(text_file, dropout=0.0, engine=engine, **options)
            folder = tmp_path / f"{engine} {name}"
            folder.mkdir()
            found = train(describe(config).job, engine, folder, save_model=False)
            losses[engine, name] = found.step_losses
    for name in ("usual", "own", "again"):
        assert losses["onward", name] == pytest.approx(losses["torch", name], rel=1e-5)
    for engine in ("onward", "torch"):
        assert losses[engine, "again"] == losses[engine, "own"]
        assert abs(losses[engine, "own"][-1] - losses[engine, "usual"][-1]) > 1e-3


def evaluations(folder: Path) -> dict[int, float]:
    """The losses of evaluations within a run, by update."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(("eval_loss" in line) != ("loss" in line) for line in lines)
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}


@pytest.mark.parametrize("engine", ["torch", pytest.param("onward", marks=pytest.mark.slow)])
def test_evaluations_within_a_run(engine: str, text_file: Path, tmp_path: Path) -> None:
    """An evaluation is the final one of a run that ends there, and none changes the training."""
    found: dict[str, tuple[float, ...]] = {}
    for name, options in (
        ("never", {}), ("steps", {"eval_strategy": "steps", "eval_steps": 2}),
        ("lines", {"eval_strategy": "steps", "logging_steps": 3}),
    ):  # fmt: skip
        config = config_of(
            text_file, lr_scheduler_type="constant", dropout=0.2, engine=engine, **options
        )
        (tmp_path / name).mkdir()
        result = train(describe(config).job, engine, tmp_path / name, save_model=False)
        found[name] = result.step_losses
    assert found["never"] == found["steps"] == found["lines"]
    assert evaluations(tmp_path / "never") == {}
    assert list(evaluations(tmp_path / "lines")) == [3]
    by_step = evaluations(tmp_path / "steps")
    assert list(by_step) == [2, 4], "the last update has the evaluation of the run's end"
    for step, loss in by_step.items():
        config = config_of(text_file, lr_scheduler_type="constant", dropout=0.2, max_steps=step)
        (tmp_path / str(step)).mkdir()
        ended = train(describe(config).job, engine, tmp_path / str(step), save_model=False)
        assert ended.eval_loss == loss


def test_evaluations_at_the_ends_of_epochs(text_file: Path, tmp_path: Path) -> None:
    config = config_of(
        text_file, max_train_samples=8, eval_strategy="epoch", max_steps=7, engine="torch"
    )
    train(describe(config).job, "torch", tmp_path, save_model=False)
    assert list(evaluations(tmp_path)) == [2, 4, 6], "two updates an epoch"


def test_a_run_that_goes_on_has_the_evaluations_of_one_that_was_not_stopped(
    text_file: Path, tmp_path: Path
) -> None:
    given = ["finetune", "--engine", "torch", "--train_file", str(text_file), "--vocab_size", "320"]
    given += ["--block_size", "32", "--config_overrides", "n_layer=1,n_embd=64"]
    given += ["--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "3"]
    given += ["--max_steps", "7", "--max_eval_samples", "2"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*given, "--output_dir", str(whole)]) == 0
    assert main([*given, "--output_dir", str(stopped)]) == 0
    # a kill after the fifth update would leave it so, with its evaluations
    (stopped / "eval_results.json").unlink()
    shutil.rmtree(stopped / "checkpoint-6")
    shutil.rmtree(stopped / "checkpoint-7")
    assert main([*given, "--output_dir", str(stopped)]) == 0
    assert evaluations(stopped) == evaluations(whole) and list(evaluations(whole)) == [2, 4, 6]


def test_the_interval_of_no_evaluations_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--eval_steps", "3"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "eval_steps is for --eval_strategy steps, not no, in --eval_steps; fix: add" in line
