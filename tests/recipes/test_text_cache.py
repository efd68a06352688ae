"""Tokens and tokenizers that are kept are those that would be made, and never those of others."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward import cache_files
from onward.recipes import corpus
from onward.recipes.trained_tokenizer import trained_tokenizer

made: Any = trained_tokenizer

SOURCE = inspect.getsource(argparse)
TEXT = [SOURCE[:20_000], SOURCE[20_000:30_000]]
FAMILIES = ["gpt2", "llama", "bert", "roberta", "t5", "whisper"]


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path))
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "1")


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("it is made again")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kept_tokenizer_is_the_one_that_was_trained(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "0")
    plain = made(TEXT, 440, 64, family)
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "1")
    first = made(TEXT, 440, 64, family)
    monkeypatch.setattr("tokenizers.Tokenizer.train_from_iterator", never)
    second = made(TEXT, 440, 64, family)
    for one in (first, second):
        assert one.backend_tokenizer.to_str() == plain.backend_tokenizer.to_str()
        assert one.special_tokens_map == plain.special_tokens_map
        assert one("a [b]", "c")["input_ids"] == plain("a [b]", "c")["input_ids"]
    for other in ((TEXT[:1], 440, 64, family), (TEXT, 450, 64, family)):
        with pytest.raises(AssertionError, match="made again"):
            made(*other)


def test_families_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {family: made(TEXT, 320, 64, family) for family in FAMILIES}
    monkeypatch.setattr("tokenizers.Tokenizer.train_from_iterator", never)
    for family, tokenizer in found.items():
        again = made(TEXT, 320, 64, family)
        assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_kept_tokens_are_those_of_the_text_and_the_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = made(TEXT, 320, 64, "gpt2")
    first = corpus.encode(tokenizer, TEXT)
    want = [
        *tokenizer(TEXT[0], add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
        *tokenizer(TEXT[1], add_special_tokens=False)["input_ids"],
    ]
    assert first.tolist() == want and first.dtype == np.int32
    encoded = corpus._encoded
    monkeypatch.setattr(corpus, "_encoded", never)
    second = corpus.encode(tokenizer, TEXT)
    assert second.tolist() == want and second.dtype == np.int32
    second[:] = 0  # a copy of the caller's
    assert corpus.encode(tokenizer, TEXT).tolist() == want
    others = [
        (tokenizer, [*TEXT, ""]), (tokenizer, [TEXT[0] + TEXT[1]]), (tokenizer, TEXT[::-1]),
        (made(TEXT, 330, 64, "gpt2"), TEXT), (made(TEXT, 320, 64, "llama"), TEXT[:1]),
    ]  # fmt: skip
    for other in others:
        with pytest.raises(AssertionError, match="made again"):
            corpus.encode(*other)
    changed = made(TEXT, 320, 64, "gpt2")
    changed.eos_token = changed.convert_ids_to_tokens(5)
    with pytest.raises(AssertionError, match="made again"):
        corpus.encode(changed, TEXT)
    monkeypatch.setattr(corpus, "_encoded", encoded)
    assert corpus.encode(changed, TEXT).tolist() != want


def test_starts_of_texts_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made(TEXT, 320, 64, "gpt2")
    plain, begun = (corpus.encode(tokenizer, TEXT, start).tolist() for start in ([], [7]))
    assert begun[0] == 7 and len(begun) == len(plain) + 2
    monkeypatch.setattr(corpus, "_encoded", never)
    assert corpus.encode(tokenizer, TEXT).tolist() == plain
    assert corpus.encode(tokenizer, TEXT, [7]).tolist() == begun
    with pytest.raises(AssertionError, match="made again"):
        corpus.encode(tokenizer, TEXT, [8])


def test_added_tokens_make_another_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made(TEXT, 320, 64, "gpt2")
    before = corpus.encode(tokenizer, TEXT)
    tokenizer.add_tokens([TEXT[0][5_000:5_030]])
    after = corpus.encode(tokenizer, TEXT)
    assert len(after) < len(before) and len(tokenizer) - 1 in after


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "another"])
def test_damaged_files_are_made_again(damage: str, tmp_path: Path) -> None:
    tokenizer = made(TEXT, 320, 64, "gpt2")
    want = corpus.encode(tokenizer, TEXT)
    files = sorted((tmp_path / "graphs").glob("*.graph"))
    assert [path.name.partition("-")[0] for path in files] == ["tokenizer", "tokens"]
    contents = [path.read_bytes() for path in files]
    for path, data, other in zip(files, contents, contents[::-1], strict=True):
        path.write_bytes(
            {
                "cut": data[:-3], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "empty": b"",
                "another": other,
            }[damage]
        )  # fmt: skip
    again = made(TEXT, 320, 64, "gpt2")
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert np.array_equal(corpus.encode(again, TEXT), want)


def test_nothing_is_kept_where_that_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "0")
    corpus.encode(made(TEXT, 320, 64, "gpt2"), TEXT)
    assert not (tmp_path / "graphs").exists()


def test_a_tokenizer_in_python_keeps_nothing(tmp_path: Path) -> None:
    class Plain:
        eos_token_id = 0

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[len(text)] for text in texts]}

    assert corpus.encode(Plain(), ["ab", "c"]).tolist() == [2, 0, 1]
    assert not (tmp_path / "graphs").exists()


def test_kept_tokens_are_pruned_with_the_graphs(tmp_path: Path) -> None:
    corpus.encode(made(TEXT, 320, 64, "gpt2"), TEXT)
    assert cache_files.size()[0] == 2
    assert cache_files.clear()[0] == 2
    assert not list((tmp_path / "graphs").glob("*.graph"))
