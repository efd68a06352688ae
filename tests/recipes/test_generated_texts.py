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
from onward.recipes.generated_texts import text_scores
from onward.recipes.options import FinetuneConfig, InputError, check_options
from onward.recipes.run_folder import PREDICTIONS

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
