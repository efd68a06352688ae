"""`onward finetune --dry_run` says what the first step takes: the plan of the step that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

import onward
from onward.cli import main
from onward.recipes.describe import describe
from onward.recipes.engines import onward_trainer
from onward.recipes.optimizers import optimizer_of
from onward.recipes.options import FinetuneConfig
from onward.recipes.start_model import build_model

SMALL: dict[str, Any] = {
    "corpus_bytes": 300_000, "vocab_size": 320, "block_size": 32, "max_steps": 2,
    "per_device_train_batch_size": 4, "max_eval_samples": 5,
}  # fmt: skip


def settings(options: dict[str, Any]) -> dict[str, Any]:
    found = {**SMALL, **options}
    return {n: v for n, v in found.items() if n != "block_size" or "task" not in options}


def told(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[str, dict[str, Any]]:
    words = [f"--{name}={value}" for name, value in settings(options).items()]
    assert main(["finetune", "--dry_run", *words]) == 0
    out = capsys.readouterr().out
    return out, json.loads(out[out.index("\n{") :])["forecast"]


@pytest.mark.parametrize(
    "options",
    [{}, {"bf16": True, "optimizer_state": "8bit"}, {"gradient_accumulation_steps": 2},
     {"task": "text-classification", "corpus_bytes": 900_000, "dropout": 0.1}],
)  # fmt: skip
def test_the_forecast_is_the_plan_of_the_step(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out, found = told(capsys, **options)
    assert "largest batch within" in out and "launches" in out
    job = describe(FinetuneConfig(**settings(options))).job
    model: Any = build_model(job.config, job.model_config)
    model.config.use_cache = False
    trainer = onward_trainer(model, optimizer_of(model, job.config), job.config)
    batch = job.first_batch(job.train, job.config.per_device_train_batch_size)
    for _ in range(job.config.gradient_accumulation_steps):
        trainer.train_step(batch)
    real = onward.explain(trainer)
    assert real.memory is not None and found["memory_bytes"] == real.memory.total
    assert (
        found["launches"] == real.launch_count
        and sum(found["memory"].values()) == (found["memory_bytes"])
    )
    parameters = sum(p.numel() for p in model.parameters())
    each = 2 if "optimizer_state" in options else 8  # bytes of two moments of a weight
    assert found["memory"]["optimizer"] >= each * parameters * 0.99
    assert found["largest_batch"] > 100 and found["free_bytes"] > found["memory_bytes"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "torch"}, "eager PyTorch plans nothing"),
        ({"engine": "torch", "compare": True}, "largest batch"),
    ],
)
def test_an_engine_without_plans_has_no_forecast(
    options: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = told(capsys, **options)
    assert words in out


def test_weights_that_do_not_fit_cost_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("onward.recipes.start_model.build_model", full)
    out, found = told(capsys)
    assert "forecast   none: no memory" in out and found == {"reason": "no memory"}


def test_weights_of_a_forecast_take_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """So that a model fits that is larger than the machine's memory, as Turing-NLG's 65 GB are."""
    width, layers = 2048, 3
    before = psutil.Process().memory_info().rss
    out, found = told(
        capsys, model_name_or_path="turing-17b", vocab_size=320,
        config_overrides=f"n_embd={width},n_layer={layers},n_head=16",
    )  # fmt: skip
    after = psutil.Process().memory_info().rss
    count = layers * (12 * width**2 + 13 * width) + 2 * width + (1024 + 320) * width
    assert found["memory"]["weights"] == pytest.approx(4 * count, rel=1e-4)
    assert found["memory"]["optimizer"] == pytest.approx(8 * count, rel=1e-4)
    assert "launches" in out and 4 * count > 600e6 and after - before < 300e6


@pytest.mark.slow
def test_a_model_of_78_layers_learns(tmp_path: Path) -> None:
    words = [f"--{name}={value}" for name, value in {**SMALL, "max_steps": 16}.items()]
    words += ["--model=turing-17b", "--config_overrides=n_embd=56", "--logging_steps=4"]
    words += [f"--output_dir={tmp_path / 'out'}", "--save_strategy=no"]
    assert main(["finetune", *words, "--learning_rate=3e-3"]) == 0
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0] - 0.3, losses


def test_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, output_dir=tmp_path / "out")
    assert not list(tmp_path.iterdir())
