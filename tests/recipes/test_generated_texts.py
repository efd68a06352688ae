"""Texts that a trained model writes: those of transformers' `generate`, scored by the usual
packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.cli import main
from onward.recipes import loop
from onward.recipes.describe import Run, describe
from onward.recipes.generated_texts import generated_texts, text_scores
from onward.recipes.options import FinetuneConfig, InputError, check_options
from onward.recipes.run_folder import PREDICTIONS, RESULTS
from onward.recipes.start_model import build_model

NARROW = "d_model=32,num_heads=2,d_kv=16,d_ff=48"


def words(tmp_path: Path, *more: str) -> list[str]:
    rows = [{"text": f"a {n} b", "summary": f"{n} {n}"} for n in range(12)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [
        "finetune", "--task", "seq2seq-lm", "--train_file", str(file), "--validation_file",
        str(file), "--vocab_size", "400", "--config_overrides", NARROW, "--max_steps", "3",
        "--predict_with_generate", "--max_target_length", "6", "--output_dir",
        str(tmp_path / "out"), "--per_device_train_batch_size", "4", "--save_strategy", "no", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_are_those_of_generate(beams: int, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    assert main(words(tmp_path, "--generation_num_beams", str(beams))) == 0
    out = tmp_path / "out"
    lines = [json.loads(line) for line in (out / PREDICTIONS).read_text().splitlines()]
    assert [line["target"] for line in lines] == [f"{n} {n}" for n in range(12)]
    assert [line["source"] for line in lines] == [f"a {n} b" for n in range(12)]
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    for line in lines:
        ids = tokenizer(line["source"], return_tensors="pt")
        with torch.no_grad():
            made = model.generate(**ids, max_new_tokens=6, num_beams=beams, do_sample=False)
        assert tokenizer.decode(made[0], skip_special_tokens=True).strip() == line["prediction"]
    results = json.loads((out / "eval_results.json").read_text())
    for name, value in text_scores(lines).items():
        assert results[name] == pytest.approx(value), name
    assert {"perplexity", "exact_match", "f1", "rougeL", "bleu"} <= set(results)
    # a run that replaces it removes the texts
    other = [word for word in words(tmp_path) if word != "--predict_with_generate"]
    assert main([*other, "--overwrite_output_dir"]) == 0
    assert not (out / PREDICTIONS).exists()


def described(tmp_path: Path, rows: list[tuple[str, str]], **options: Any) -> Run:
    file = tmp_path / "rows.jsonl"
    lines = (json.dumps({"text": a, "summary": b}) for a, b in rows)
    file.write_text("\n".join(lines), encoding="utf-8")
    given: dict[str, Any] = {
        "task": "seq2seq-lm", "train_file": str(file), "validation_file": str(file),
        "vocab_size": 400, "predict_with_generate": True, "per_device_train_batch_size": 1,
    }  # fmt: skip
    if "model_name_or_path" not in options:
        given["config_overrides"] = NARROW
    else:
        del given["vocab_size"]
    return describe(FinetuneConfig(**{**given, **options}))


def written(run: Run) -> tuple[Any, list[dict[str, str]]]:
    """The model of a run as it starts, and what it writes."""
    job = run.job
    model = build_model(job.config, job.model_config)
    return model, generated_texts(model, job.task, job.eval, job.processor, job.config)


def test_targets_are_compared_whole_and_those_cut_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "one two  three\nfour five \u00e9\U0001f600 six seven eight nine ten"
    rows = [("a", "b"), ("c " * 400, long), ("d", "")]
    run = described(tmp_path, rows, max_target_length=4)
    said = capsys.readouterr().err
    assert "note: 2 of 6 targets are cut at 4 tokens\n" in said
    assert "note: 2 of 6 sources are cut at 256 tokens\n" in said
    labels = [row["labels"] for row in run.job.train]
    assert len(labels[1]) == 4 and labels[1][-1] == run.tokenizer.eos_token_id
    assert "_target" not in run.job.train.columns and "_target" in run.job.eval.columns
    assert [text["target"] for text in written(run)[1]] == ["b", long, ""]
    plain = described(tmp_path, rows, predict_with_generate=False).job
    assert "_target" not in plain.eval.columns
    assert len(plain.train[1]["labels"]) > 20, "the usual number is 128"
    assert "targets are cut" not in capsys.readouterr().err


def test_the_usual_targets_have_128_tokens(tmp_path: Path) -> None:
    rows = [("a", "b c " * 200), ("c", "d")]
    job = described(tmp_path, rows).job
    assert len(job.train[0]["labels"]) == 128


def test_texts_fit_into_the_decoders_positions(tmp_path: Path) -> None:
    """A BART of 12 positions, for which the usual number of tokens is too large."""
    from transformers import BartConfig, BartForConditionalGeneration

    from onward.recipes.trained_tokenizer import trained_tokenizer

    tokenizer = trained_tokenizer(["a b c d e f"], 300, 12, "roberta")
    tokenizer.save_pretrained(tmp_path / "model")
    ids: Any = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=12, forced_eos_token_id=None,
        decoder_start_token_id=ids["eos_token_id"], **ids,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    rows = [("a b", "c d e"), ("c", "d " * 40)]
    run = described(tmp_path, rows, model_name_or_path=str(tmp_path / "model"))
    assert len(run.job.train[1]["labels"]) == 12
    model, texts = written(run)
    with torch.no_grad():
        batch = tokenizer(["a b", "c"], padding=True, return_tensors="pt")
        made: Any = model.generate(**batch, max_new_tokens=11, do_sample=False)
    want = [str(tokenizer.decode(one, skip_special_tokens=True)).strip() for one in made]
    assert [text["prediction"] for text in texts] == want
    with pytest.raises(InputError, match="max_target_length 13 is over the model's 12 positions"):
        described(tmp_path, rows, model_name_or_path=str(tmp_path / "model"), max_target_length=13)


@pytest.mark.parametrize("failing", ["evaluate", "generated_texts"])
def test_a_failure_behind_the_training_loses_nothing(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError

    given = words(tmp_path, "--engine", "torch")
    given[given.index("no")] = "steps"
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(loop, failing, fails)
        with pytest.raises(ZeroDivisionError):
            main(given)
    AutoModelForSeq2SeqLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out)("a b")["input_ids"]
    kept = (out / "model.safetensors").read_bytes()
    assert not (out / RESULTS).exists(), "the run is not complete"
    assert main(given) == 0
    assert (out / RESULTS).exists() and (out / PREDICTIONS).exists()
    assert (out / "model.safetensors").read_bytes() == kept
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


def test_scores_are_those_of_the_usual_packages() -> None:
    import jiwer
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_bleu

    told = ["the cat sat on the mat", "a dog", "", "opens a file and reads all of it"]
    true = ["the cat is on the mat", "a dog", "x", "opens a file and writes all of it"]
    texts = [{"prediction": a, "target": b} for a, b in zip(told, true, strict=True)]
    scores = text_scores(texts)
    rouge = RougeScorer(["rougeL"], use_stemmer=True)
    want = [rouge.score(b, a)["rougeL"].fmeasure for a, b in zip(told, true, strict=True)]
    assert scores["rougeL"] == pytest.approx(100 * np.mean(want))
    assert scores["bleu"] == pytest.approx(corpus_bleu(told, [true]).score)
    assert scores["exact_match"] == 25
    assert scores["wer"] == pytest.approx(100 * jiwer.wer(true, told))
    assert scores["cer"] == pytest.approx(100 * jiwer.cer(true, told))
    assert text_scores(texts[1:2]) | {"bleu": 0.0} == {
        "exact_match": 100, "f1": 100, "rouge1": 100, "rouge2": 100, "rougeL": 100, "bleu": 0.0,
        "wer": 0, "cer": 0,
    }  # fmt: skip


def test_scores_without_packages_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert set(text_scores([{"prediction": "a", "target": "b"}])) == {"exact_match", "f1"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"task": "masked-lm", "predict_with_generate": True}, "has no predict_with_generate"),
        ({"task": "seq2seq-lm", "generation_num_beams": 0}, "generation_num_beams is 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        check_options(FinetuneConfig(**options))
