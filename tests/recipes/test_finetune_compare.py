"""The comparison's table and figures, and the whole comparison where the engine is there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from onward.cli import main
from onward.recipes.compare import comparison, largest_difference, run_engine, table
from onward.recipes.describe import describe
from onward.recipes.loop import EngineResult, Job
from onward.recipes.options import FinetuneConfig
from onward.recipes.tasks import Baseline


def result(engine: str, seconds: float, losses: tuple[float, ...]) -> EngineResult:
    return EngineResult(
        engine=engine,
        step_losses=losses,
        first_step_s=seconds / 10,
        train_s=seconds,
        eval_s=1.0,
        tokens_per_second=1000 / seconds,
        base_rss_mib=100.0,
        peak_rss_mib=100.0 + 20 * seconds,
        eval_loss=2.0,
        start_weights_sha256="same",
        scores={"perplexity": 7.389},
    )


def test_table_has_both_columns_and_the_largest_difference() -> None:
    ours = result("onward", 9.0, (4.0, 3.03, 2.0))
    reference = result("torch", 19.0, (4.0, 3.0, 2.002))
    difference, step = largest_difference(ours, reference)
    assert (difference, step) == (pytest.approx(0.01), 2)
    text = table(ours, reference, Baseline("perplexity", "unigram model", 321.5, lower=True))
    *lines, between, words = text.splitlines()
    assert between == "" and words == (
        "Onward is 2.0x as fast in total, 2.1x as fast after the first step, with 42% less memory "
        "than eager PyTorch."
    )
    rows = {line[:36].strip(): line[36:].split() for line in lines}
    assert rows[""] == ["onward", "torch"]
    assert rows["total time, s"] == ["10.0", "20.0", "2.00x", "as", "fast"]
    assert rows["tokens/s after the first step"] == ["111", "53", "2.11x", "as", "fast"]
    assert rows["peak memory, MiB"] == ["280", "480", "0.58x", "the", "memory"]
    assert rows["perplexity"] == ["7.3890", "7.3890"]
    assert rows["perplexity, unigram model"] == ["321.50", "321.50"]
    assert rows["largest relative loss difference"] == ["1.0e-02", "at", "update", "2"]
    json.dumps(comparison(ours, reference), allow_nan=False)


def test_the_memory_of_runs_on_a_gpu_is_the_gpus() -> None:
    """The process's own is told beside it; on a CPU there is no other, and a loss of 0 is shown."""
    held = [result("onward", 9.0, (4.0, 0.0)), result("torch", 19.0, (4.0, 0.0))]
    baseline = Baseline("perplexity", "unigram model", 321.5, lower=True)
    on_gpu = [dataclasses.replace(r, peak_device_mib=n, eval_loss=0.0)
              for r, n in zip(held, (300.0, 1000.0), strict=True)]  # fmt: skip
    text = table(on_gpu[0], on_gpu[1], baseline)
    rows = {line[:36].strip(): line[36:].split() for line in text.splitlines()}
    assert rows["peak memory of the GPU, MiB"] == ["300", "1000", "0.30x", "the", "memory"]
    assert rows["peak memory, MiB"] == ["280", "480", "0.58x", "the", "memory"]
    assert rows["eval loss"] == ["0.0000", "0.0000"]
    assert text.endswith("with 70% less memory than eager PyTorch.")
    assert "GPU" not in table(held[0], held[1], baseline)


@pytest.mark.parametrize(
    ("ours", "reference", "difference"),
    [((1.0, 0.0), (1.0, 0.0), 0.0), ((1.0, 0.5), (1.0, 0.0), 1.0), ((2.0, 0.0), (1.0, 0.0), 1.0)],
)
def test_a_loss_of_nothing_has_a_difference(
    ours: tuple[float, ...], reference: tuple[float, ...], difference: float
) -> None:
    """A model that has learnt a batch by heart has a loss of 0 in fp32."""
    found, _ = largest_difference(result("onward", 9.0, ours), result("torch", 9.0, reference))
    assert found == difference


def test_job_survives_the_way_to_another_process(tmp_path: Path, text_file: Path) -> None:
    config = FinetuneConfig(train_file=str(text_file), vocab_size=300, block_size=16, dropout=0.0)
    job = describe(config).job
    job.save(tmp_path)
    again = Job.load(tmp_path)
    assert again.config == job.config
    assert again.model_config.to_dict()["resid_pdrop"] == 0.0
    assert again.model_config.vocab_size == job.model_config.get_text_config().vocab_size
    assert (again.train.blocks == job.train.blocks).all()
    assert (again.eval.blocks == job.eval.blocks).all()
    text = "def f(x):"
    assert again.tokenizer(text)["input_ids"] == job.tokenizer(text)["input_ids"]


@pytest.mark.slow
def test_engine_in_its_own_process_gives_the_same_losses(tmp_path: Path, text_file: Path) -> None:
    from onward.recipes.loop import train

    config = FinetuneConfig(
        train_file=str(text_file), vocab_size=300, block_size=16, max_steps=3, dropout=0.0
    )
    job = describe(config).job
    for name in ("job", "here", "there"):
        (tmp_path / name).mkdir()
    job.save(tmp_path / "job")
    there = run_engine(tmp_path / "job", "torch", tmp_path / "there")
    here = train(job, "torch", tmp_path / "here", save_model=False)
    assert there.start_weights_sha256 == here.start_weights_sha256
    assert there.step_losses == pytest.approx(here.step_losses, rel=1e-5)
    assert 50 < there.base_rss_mib < there.peak_rss_mib


@pytest.mark.slow
def test_compare(tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    output = tmp_path / "out"
    options = ["--train_file", str(text_file), "--vocab_size", "320", "--block_size", "32"]
    options += ["--max_steps", "8", "--dropout", "0", "--output_dir", str(output), "--compare"]
    assert main(["finetune", *options]) == 0
    out = capsys.readouterr().out
    assert "onward       torch" in out and "masks" not in out
    record = json.loads((output / "compare.json").read_text())
    assert record["max_relative_loss_difference"] < 1e-3
    ours, reference = record["engines"]
    assert ours["eval_loss"] == pytest.approx(reference["eval_loss"], rel=1e-3)
    assert (output / "model.onnx").exists() and (output / "torch" / "metrics.jsonl").exists()
    AutoModelForCausalLM.from_pretrained(output)
