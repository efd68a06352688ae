"""`onward data`: counts of a run's data and its tokens, against the tokenizer and the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from onward.cli import main
from onward.recipes.describe import describe
from onward.recipes.options import FinetuneConfig
from onward.recipes.preview import histogram, shown_block


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["data", *words]) == 0
    return capsys.readouterr().out


def test_counts_are_those_of_the_run(
    text: str, text_file: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    words = ["--model", str(model_folder), "--train_file", str(text_file), "--block_size", "24"]
    found = json.loads(said(capsys, *words, "--json"))
    ids = AutoTokenizer.from_pretrained(model_folder)(text, add_special_tokens=False)["input_ids"]
    blocks, rest = divmod(len(ids), 24)
    assert (found["train_tokens"], found["left_out"]) == (len(ids), rest)
    assert found["train_samples"] + found["eval_samples"] == blocks
    assert (found["documents"], found["characters"]) == (1, len(text))
    assert found["labelled"] == pytest.approx(23 / 24)
    trained = ids[: found["train_samples"] * 24]
    assert found["used"] == len(set(trained)) and found["vocabulary"] == 320
    assert found["unknown"] is None, "bytes have tokens"


def test_tokens_are_shown_between_marks(
    text_file: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = FinetuneConfig(
        model_name_or_path=str(model_folder), train_file=str(text_file), block_size=32
    )
    run = describe(config)
    for block in run.job.train.blocks[:5]:
        shown = shown_block(run.tokenizer, block)
        lines = [line.removeprefix("  ") for line in shown.splitlines()]
        assert max(map(len, lines)) <= 100
        seen = "".join(lines).replace("|", "").replace("\u21b5", "").replace(" ", "")
        want = str(run.tokenizer.decode(block))
        want = want.replace("\n", "").replace("|", "").replace(" ", "")
        assert seen == want
        inner = [line for line in lines if not line.startswith("\u21b5")]
        assert sum(line.count("|") for line in inner) + len(lines) <= 2 * len(block)
    words = ["--model", str(model_folder), "--train_file", str(text_file), "--block_size", "32"]
    assert said(capsys, *words, "--samples", "3").count("\nblock ") == 3
    assert said(capsys, *words, "--samples", "0").count("\nblock ") == 0


def test_many_documents_have_a_histogram(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--corpus_bytes", "60000", "--vocab_size", "300", "--block_size", "16"]
    text = said(capsys, *words, "--samples", "1")
    assert "length, characters" in text and "\u2588" in text


def test_lengths_are_counted_between_powers_of_two() -> None:
    lengths = np.random.default_rng(0).integers(1, 5000, 400).tolist()
    _, *lines = histogram(lengths, "tokens")
    total = 0
    for line in lines:
        low, _, high, count, *_ = line.replace(",", "").split()
        inside = sum(int(low) <= n <= int(high) for n in lengths)
        assert inside == int(count) and int(high) == 2 * int(low) - 1
        total += inside
    assert total == 400


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--samples", "-1"], "samples is -1, in --samples; fix: give a value of 0 or more"),
        (["--train_file", "none.txt"], "no such file 'none.txt', in --train_file"),
        (["--sample", "1"], "did you mean --samples?"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("onward data: error: ") and told in line
