"""`onward pretrain`: the two phases, pairs of texts, hidden words, and shards on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.cli import main, parse
from onward.recipes.describe import describe
from onward.recipes.document_shards import prepared, sentences_of
from onward.recipes.options import FinetuneConfig, InputError, PretrainConfig
from onward.recipes.pretrain import as_finetune
from onward.recipes.tasks.bert_pretraining import by_frequencies, hide_words
from onward.recipes.tasks.task import IGNORED_LABEL
from onward.recipes.trained_tokenizer import trained_tokenizer


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve documents, whose sentences each begin with the document's name."""
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    letters = "abcdefghijkl"
    documents = [
        "\n".join(f"{name} sentence {i} of document {name} {name}" for i in range(8))
        for name in letters
    ]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return path


def config(words: Path, **options: Any) -> FinetuneConfig:
    given: dict[str, Any] = {
        "task": "bert-pretraining", "train_file": str(words), "vocab_size": 300, "block_size": 40,
        "max_steps": 2, "per_device_train_batch_size": 2, **options,
    }  # fmt: skip
    return FinetuneConfig(**given)


def test_the_phases_are_those_of_the_recipe() -> None:
    for phase, size, batch, updates, rate, warmup in (
        (1, 128, 65536, 7038, 6e-3, 0.2843), (2, 512, 32768, 1563, 4e-3, 0.128),
    ):  # fmt: skip
        given = parse(["--phase", str(phase)], "pretrain", PretrainConfig)
        assert given is not None
        made = as_finetune(given, 1)
        assert (made.block_size, made.max_steps, made.learning_rate) == (size, updates, rate)
        assert made.warmup_ratio == warmup and made.optim == "lamb" and made.task == given.task
        assert made.gradient_accumulation_steps * made.per_device_train_batch_size == batch
        # an update on four processes has as many pairs
        shared = as_finetune(given, 4)
        assert 4 * shared.gradient_accumulation_steps == made.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--global_batch_size", "30"], "30 sequences of an update are not a multiple of 8"),
        (
            ["--global_batch_size", "32", "--gradient_accumulation_steps", "3"],
            "3 micro-batches of 8",
        ),
        (["--phase", "3"], "phase is '3', in --phase"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("onward pretrain: error: ") and told in line and "; fix: " in line


def test_documents_end_at_empty_lines_or_after_so_many() -> None:
    assert list(sentences_of("a\nb\n\n\nc\n")) == [["a", "b"], ["c"]]
    assert [len(d) for d in sentences_of("x\n" * 130)] == [64, 64, 2]
    [[first, second]] = sentences_of("one. " * 300 + "two. " * 300)
    assert first.startswith("one.") and second.endswith("two.") and len(first) <= 2000


def test_shards_are_the_tokens_of_each_sentence_and_are_made_once(
    words: Path, tmp_path: Path
) -> None:
    text = words.read_text()
    tokenizer: Any = trained_tokenizer([text], 300, 64, "bert")
    shards = prepared([text], tokenizer, tmp_path / "shards")
    assert len(shards) == 12 and isinstance(shards.tokens, np.memmap)
    lines = [line for line in text.splitlines() if line]
    for i, line in enumerate(lines):
        found = shards.tokens[shards.sentences[i] : shards.sentences[i + 1]]
        assert found.tolist() == tokenizer(line, add_special_tokens=False)["input_ids"]
    assert shards.documents.tolist() == list(range(0, 97, 8))
    [folder] = (tmp_path / "shards").iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    prepared([text], tokenizer, tmp_path / "shards")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    (folder / "shards.json").write_text("{")  # as if its writing had been cut
    again = prepared([text], tokenizer, tmp_path / "shards")
    assert (again.tokens == shards.tokens).all()


def test_a_pair_is_of_one_document_or_of_two_as_its_label_says(words: Path) -> None:
    job = describe(config(words)).job
    tokenizer: Any = job.tokenizer
    draw = job.task.draw(job.train, tokenizer, job.config)
    np.random.seed(0)
    labels, own = [], 0
    held = job.task.draw(job.eval, tokenizer, job.config)
    assert len(job.eval.beside["taken"]) == 1, "one document, and pairs of two all the same"
    taken = [draw(row) for row in job.train for _ in range(20)]
    for found in [*taken, *(held(row) for row in job.eval for _ in range(20))]:
        ids, hidden = np.array(found["input_ids"]), np.array(found["labels"])
        whole = np.where(hidden != IGNORED_LABEL, hidden, ids)
        types = np.array(found["token_type_ids"])
        assert len(ids) == len(types) <= job.config.block_size
        assert whole[0] == tokenizer.cls_token_id and whole[-1] == tokenizer.sep_token_id
        assert (whole == tokenizer.sep_token_id).sum() == 2
        first, second = (tokenizer.decode(whole[types == kind]).split() for kind in (0, 1))
        names = [{w for w in part if len(w) == 1 and w.isalpha()} for part in (first, second)]
        assert len(names[0]) <= 1 and len(names[1]) <= 1
        if names[0] and names[1]:
            assert (names[0] == names[1]) == (found["next_sentence_label"] == 0)
            own += names[0] == names[1]
        labels.append(found["next_sentence_label"])
    assert 0.4 < np.mean(labels) < 0.75 and own > 20


def test_whole_words_are_hidden() -> None:
    size, mask = 100, 4
    special = np.arange(size) < 5
    goes_on = np.arange(size) >= 60  # tokens that go on with a word
    rng = np.random.default_rng(0)
    share: list[float] = []
    kinds = np.zeros(3)
    for _ in range(300):
        ids = np.concatenate([[2], rng.integers(5, size, 60), [3]])
        before = ids.copy()
        labels = hide_words(ids, special, goes_on, mask, 0.15)
        hidden = labels != IGNORED_LABEL
        assert (labels[hidden] == before[hidden]).all() and (ids[~hidden] == before[~hidden]).all()
        assert not hidden[0] and not hidden[-1]
        for place in range(2, 61):  # a word is hidden as a whole
            if goes_on[before[place]] and place > 1:
                assert hidden[place] == hidden[place - 1]
        share.append(hidden.sum() / 60)
        kinds += [(ids[hidden] == mask).sum(), (ids[hidden] == before[hidden]).sum(), hidden.sum()]
    assert np.mean(share) == pytest.approx(0.15, abs=0.005)
    assert kinds[0] / kinds[2] == pytest.approx(0.8, abs=0.02)
    assert kinds[1] / kinds[2] == pytest.approx(0.1, abs=0.02)


@pytest.mark.slow
def test_phase_2_goes_on_from_phase_1(words: Path, tmp_path: Path) -> None:
    small = ["--train_file", str(words), "--per_device_train_batch_size", "4", "--max_steps", "3"]
    small += ["--global_batch_size", "8", "--dataloader_num_workers", "0"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["pretrain", "--model", "bert-tiny", "--vocab_size", "300", *small,
                 "--block_size", "40", "--output_dir", str(one)]) == 0  # fmt: skip
    assert main(["pretrain", "--phase", "2", "--model", str(one), *small, "--block_size", "64",
                 "--output_dir", str(two)]) == 0  # fmt: skip
    options = json.loads((two / "run_config.json").read_text())["options"]
    assert options["learning_rate"] == 4e-3 and options["optim"] == "lamb"
    lines = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < np.log(300) + np.log(2), "better than a guess of each"
    start = json.loads((two / "eval_results.json").read_text())["eval_loss"]
    assert start < json.loads((one / "eval_results.json").read_text())["eval_loss"] + 0.5
    from transformers import BertForPreTraining

    assert BertForPreTraining.from_pretrained(two).config.vocab_size <= 300


def test_a_text_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a b c\n" * 5)
    with pytest.raises(InputError, match="the text has 1 documents"):
        describe(config(tmp_path / "one.txt"))


def test_the_baseline_knows_the_training_text_alone() -> None:
    """Held-out tokens by how often each is in the training text, one more of each: of 4 tokens in
    a vocabulary of 4, token 1 has a share of 2 / 8, and one that never came 1 / 8."""
    known, held = np.array([3, 1]), np.array([0, 2, 0, 1])
    found = by_frequencies(known, held, words=4)
    assert found == pytest.approx(-(2 * np.log(2 / 8) + np.log(1 / 8)) / 3)
