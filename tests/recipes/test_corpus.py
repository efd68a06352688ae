"""Text, tokens, blocks and the unigram baseline."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizers import with_template

from onward.recipes.corpus import (
    Text,
    begun,
    blocks,
    encode,
    encode_each,
    python_library,
    read_text_file,
    split_blocks,
    text_start,
    train_tokenizer,
    unigram_perplexity,
)
from onward.recipes.options import InputError


def test_built_in_corpus_is_stable_split_by_file_and_capped() -> None:
    train, evaluation = python_library(1_000_000)
    again = python_library(1_000_000)
    assert (train.sha256, evaluation.sha256) == (again[0].sha256, again[1].sha256)
    assert 0.8e6 < len(train) + len(evaluation) <= 1e6
    assert not set(train.documents) & set(evaluation.documents)
    # A larger cap only adds files: the order does not depend on it.
    assert set(python_library(2_000_000)[1].documents) > set(evaluation.documents)


def test_built_in_corpus_hash_follows_the_content_and_leaves_tests_out(tmp_path: Path) -> None:
    for number in range(80):
        (tmp_path / f"module{number}.py").write_text(f"x = {number}\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("SKIPPED\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    before = python_library(10_000, tmp_path)
    documents = before[0].documents + before[1].documents
    assert len(documents) == 80 and not any("SKIPPED" in document for document in documents)
    (tmp_path / "module3.py").write_text("x = 4\n")
    after = python_library(10_000, tmp_path)
    assert [a.sha256 == b.sha256 for a, b in zip(before, after, strict=True)].count(False) == 1


def test_built_in_corpus_says_when_it_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"0 train and 0 eval files.*fix: raise --corpus_bytes"):
        python_library(1000, tmp_path)


def test_text_file_hash_is_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    data = b"\xef\xbb\xbf = Title = \n caf\xc3\xa9 @-@ <unk> \n"
    path.write_bytes(data)
    text = read_text_file(path, "train_file")
    assert text == Text(
        str(path), (" = Title = \n caf\u00e9 @-@ <unk> \n",), hashlib.sha256(data).hexdigest()
    )


@pytest.mark.parametrize(
    ("data", "words"), [(b" \n\t", "has no text"), (b"ab\xff", "not UTF-8 text at byte 2")]
)
def test_text_file_that_is_no_text(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(InputError, match=words):
        read_text_file(path, "train_file")


def test_tokenizer_gives_the_text_back_and_survives_saving(tmp_path: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = train_tokenizer([text], 400, 64)
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    odd = text[:3000] + " \u00e9\u4e2d\U0001f600\r\n\n\n  end"
    ids = encode(tokenizer, [odd])
    assert len(tokenizer) == 400 and ids.max() < 400
    assert tokenizer.decode(ids.tolist()) == odd
    assert reloaded.decode(encode(reloaded, [odd]).tolist()) == odd
    assert reloaded.eos_token_id == tokenizer.eos_token_id == 0


def test_documents_are_joined_by_end_of_text_and_long_ones_lose_nothing(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer([text], 300, 64)
    parts = [encode(tokenizer, [half]) for half in (text[:500], text[500:900])]
    np.testing.assert_array_equal(
        encode(tokenizer, [text[:500], text[500:900]]), np.concatenate([parts[0], [0], parts[1]])
    )
    monkeypatch.setattr("onward.recipes.corpus.PIECE_CHARS", 1000)
    long_line = "x" * 2500 + "\n"
    ids = encode(tokenizer, [text + long_line])
    assert tokenizer.decode(ids.tolist()) == text + long_line


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>"])
def test_documents_begin_as_the_tokenizer_begins_a_text(single: str, text: str) -> None:
    """The tokens are those of run_clm, with the end-of-text token between two documents."""
    tokenizer = with_template(text, single)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    documents = [text[:500], text[500:900], text[900:950]]
    start = text_start(tokenizer)
    assert start == [begin]
    whole = [tokenizer(part)["input_ids"] for part in documents]
    whole = [[*ids, *([] if ids[-1] == end else [end])] for ids in whole]
    found = [ids.tolist() for ids in encode_each(tokenizer, documents, start)]
    assert found == whole and all(ids[0] == begin for ids in found)
    joined = encode(tokenizer, documents, start).tolist()
    assert joined == [number for ids in whole for number in ids][:-1]
    # a template of a chat has written them into the texts
    marked = [f"<s>{part}</s>" for part in documents]
    assert [ids.tolist() for ids in encode_each(tokenizer, marked, start)] == whole
    assert encode(tokenizer, marked, start).tolist() == [*joined, end]


def test_a_start_that_is_the_end_of_text_separates_alone(text: str) -> None:
    """The tokenizer is as OPT's, the tokens are those of run_clm."""
    tokenizer = with_template(text, "</s> $A")
    documents = [text[:500], text[500:900]]
    want = [number for part in documents for number in tokenizer(part)["input_ids"]]
    start = text_start(tokenizer)
    assert encode(tokenizer, documents, start).tolist() == want
    ended = [f"{part}</s>" for part in documents]
    assert encode(tokenizer, ended, start).tolist() == [*want, tokenizer.eos_token_id]


def test_a_tokenizer_that_begins_no_text_encodes_as_before(text: str) -> None:
    tokenizer = train_tokenizer([text], 300, 64)
    start = text_start(tokenizer)
    assert start == [] and begun([5, 6], start) == [5, 6]
    documents = [text[:300], f"{text[300:600]}<|endoftext|>", text[600:700]]
    plain: list[list[int]] = tokenizer(documents, add_special_tokens=False)["input_ids"]  # type: ignore[assignment]
    assert encode(tokenizer, documents, start).tolist() == [
        *plain[0], 0, *plain[1], 0, *plain[2],
    ]  # fmt: skip
    found = [ids.tolist() for ids in encode_each(tokenizer, documents, start)]
    assert found == [[*ids, 0] for ids in plain]


def test_runs_of_causal_models_see_starts_and_those_of_masked_ones_do_not(
    text: str, tmp_path: Path
) -> None:
    from transformers import LlamaConfig

    from onward.recipes.options import FinetuneConfig
    from onward.recipes.tasks import task_of

    tokenizer = with_template(text, "<s> $A </s>")
    begin = tokenizer.bos_token_id
    model: Any = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64)
    source = Text("a", tuple(text[i : i + 200] for i in range(0, 4000, 200)), "")
    common: dict[str, Any] = {"block_size": 32, "model_name_or_path": "llama-tiny"}
    packed = task_of(config := FinetuneConfig(**common)).encode([source], tokenizer, model, config)
    ids = np.concatenate([packed.train.blocks, packed.eval.blocks]).reshape(-1)
    want = [n for part in source.documents for n in tokenizer(part)["input_ids"]]
    np.testing.assert_array_equal(ids, want[: len(ids)])
    config = FinetuneConfig(**{**common, "block_size": 64}, packing=False)
    apart = task_of(config).encode([source], tokenizer, model, config)
    starts = sum(row["input_ids"][0] == begin for part in (apart.train, apart.eval) for row in part)
    assert starts == len(source.documents)
    config = FinetuneConfig(**common, task="masked-lm")
    hidden = task_of(config).encode([source], tokenizer, model, config).train.blocks
    assert (hidden[:, 0] == begin).all() and (hidden[:, 1:] != begin).all()


def test_blocks_cover_the_ids_without_overlap() -> None:
    ids = np.arange(103, dtype=np.int32)
    cut = blocks(ids, 10)
    np.testing.assert_array_equal(cut.reshape(-1), ids[:100])
    assert cut.shape == (10, 10)
    assert blocks(ids[:9], 10).shape == (0, 10)


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (39, 1), (40, 2), (400, 20)])
def test_held_out_blocks_are_the_last_ones(count: int, held_out: int) -> None:
    everything = np.arange(count * 4, dtype=np.int32).reshape(count, 4)
    train, evaluation = split_blocks(everything)
    assert len(evaluation) == held_out
    np.testing.assert_array_equal(np.concatenate([train, evaluation]), everything)


def test_unigram_perplexity_by_hand() -> None:
    train = np.array([[0, 0, 1]], dtype=np.int32)  # (2+1, 1+1, 0+1) of 6
    evaluation = np.array([[2, 0, 1], [2, 2, 0]], dtype=np.int32)  # predicted: 0 1 2 0
    expected = math.exp(-(2 * math.log(3 / 6) + math.log(2 / 6) + math.log(1 / 6)) / 4)
    assert unigram_perplexity(train, evaluation, 3) == pytest.approx(expected, rel=1e-12)
