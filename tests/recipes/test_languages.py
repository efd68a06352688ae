"""`--source_lang` and `--target_lang`: texts are marked as transformers marks them, and `generate`
begins as the decoder's inputs do in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizers import LANGUAGES, with_languages

from onward.cli import main
from onward.recipes.describe import Run, describe
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.start_model import build_model

ROWS = [("bonjour monde", "guten tag"), ("monde bonjour", "tag"), ("monde", "tag guten")]


def model_folder(folder: Path, name: str, **options: Any) -> str:
    """A tiny model with a tokenizer of this class, as save_pretrained writes them."""
    from transformers import M2M100Config, MBartConfig, MBartForConditionalGeneration

    tokenizer = with_languages(name, **options)
    kind: Any = M2M100Config if name == "NllbTokenizer" else MBartConfig
    config = kind(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=16, pad_token_id=1, eos_token_id=2,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_config(config)
    assert isinstance(model, MBartForConditionalGeneration) == (kind is MBartConfig)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def table(folder: Path) -> str:
    file = folder / "rows.jsonl"
    lines = [json.dumps({"text": a, "summary": b}) for a, b in ROWS]
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def described(folder: Path, name: str, saved: dict[str, Any] | None = None, **more: Any) -> Run:
    file, model = table(folder), model_folder(folder / "model", name, **saved or {})
    return describe(
        FinetuneConfig(
            task="seq2seq-lm", model_name_or_path=model, train_file=file, validation_file=file,
            per_device_train_batch_size=3, **more,
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_texts_are_marked_and_begun_as_transformers_does(name: str, tmp_path: Path) -> None:
    _, source, target = LANGUAGES[name]
    job = described(tmp_path, name, source_lang=source, target_lang=target).job
    fresh = with_languages(name, src_lang=source, tgt_lang=target)
    for row, (text, summary) in zip(job.train, ROWS, strict=True):
        want = fresh(text, text_target=summary)
        assert row["input_ids"] == want["input_ids"] and row["labels"] == want["labels"]
    model: Any = job.task.settled(build_model(job.config, job.model_config), job.processor)
    batch = job.first_batch(job.train, 3)
    begun = job.task.deployed(batch, model)["decoder_input_ids"][:, :2]
    seen: list[torch.Tensor] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    model(**batch)
    hook.remove()
    assert torch.equal(seen[0][:, :2], begun)
    code = fresh.convert_tokens_to_ids(target)
    assert (begun == code).any(dim=1).all()
    made = model.generate(
        **{n: t for n, t in batch.items() if n != "labels"}, max_new_tokens=4, do_sample=False
    )
    assert torch.equal(made[:, 0], begun[:, 0])
    if name != "MBartTokenizer":  # whose decoder begins with the language itself
        assert (made[:, 1] == code).all()


def test_a_run_is_saved_with_its_languages(tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    name = "MBart50Tokenizer"
    folder, file = model_folder(tmp_path / "model", name), table(tmp_path)
    words = ["--task", "seq2seq-lm", "--train_file", file, "--validation_file", file, "--engine"]
    words += ["torch", "--max_steps", "1", "--per_device_train_batch_size", "3", "--save_strategy"]
    words += ["no", "--output_dir", str(tmp_path / "out"), "--predict_with_generate"]
    languages = ["--source_lang", "fr_XX", "--target_lang", "de_DE"]
    assert main(["finetune", "--model", folder, *words, *languages]) == 0
    out = tmp_path / "out"
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(out)
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    code = tokenizer.convert_tokens_to_ids("de_DE")
    assert model.generation_config.forced_bos_token_id == code
    lines = (out / "generated_predictions.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        made = model.generate(**tokenizer(line["source"], return_tensors="pt"), max_new_tokens=15)
        assert int(made[0, 1]) == code
        assert tokenizer.decode(made[0], skip_special_tokens=True).strip() == line["prediction"]
    again = described(tmp_path / "out", name, {"src_lang": "fr_XX", "tgt_lang": "de_DE"})
    assert again.job.tokenizer.tgt_lang == "de_DE", "those that the tokenizer was saved with"


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("MBart50Tokenizer", {}, "source_lang and target_lang are not given, in --source_lang and"),
        ("MBartTokenizer", {"source_lang": "fr_XX"}, "target_lang is not given, in --source_lang"),
        ("NllbTokenizer", {"target_lang": "deu_Latn"}, "source_lang is not given, in --source_"),
        (
            "MBartTokenizer",
            {"source_lang": "fr_XX", "target_lang": "de"},
            "no language 'de', in --t",
        ),
        ("MBart50Tokenizer", {"source_lang": "fr", "target_lang": "de_DE"}, "no language 'fr', in"),
        ("NllbTokenizer", {"source_lang": "fr", "target_lang": "de"}, "no language 'fr', in --sou"),
    ],
)
def test_languages_that_are_missing_or_unknown_are_refused(
    name: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        described(tmp_path, name, **options)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_targets_that_the_model_does_not_begin_with_are_refused(tmp_path: Path) -> None:
    options = {"source_lang": "fra_Latn", "target_lang": "deu_Latn"}
    with pytest.raises(InputError, match="a m2m_100 does not begin texts as NllbTokenizer"):
        described(tmp_path, "NllbTokenizer", {"legacy_behaviour": True}, **options)


def test_a_tokenizer_without_languages_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(tmp_path)
    describe(
        FinetuneConfig(
            task="seq2seq-lm", train_file=file, validation_file=file, vocab_size=500,
            source_lang="en", target_lang="de", per_device_train_batch_size=3,
        )
    )  # fmt: skip
    told = "note: --source_lang and --target_lang change nothing: the tokenizer has no languages\n"
    assert capsys.readouterr().err == told
    with pytest.raises(InputError, match="task causal-lm has no source_lang"):
        describe(FinetuneConfig(source_lang="en"))
