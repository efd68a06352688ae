"""`--packing false`: each document is cut by itself, and padding changes no number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.cli import main
from onward.recipes.describe import Run, describe
from onward.recipes.loop import train
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.start_model import build_model
from onward.recipes.tasks.task import IGNORED_LABEL

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "looks", "back")
NARROW = {
    "causal-lm": "n_layer=2,n_embd=32,n_head=2",
    "masked-lm": "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=48",
}


def paragraphs(count: int = 40) -> list[str]:
    """Texts of 1 to 40 words, without a blank line in them."""
    random = np.random.default_rng(0)
    return [
        "\n".join(" ".join(random.choice(WORDS, 5)) for _ in range(random.integers(1, 9)))
        for _ in range(count)
    ]


def described(path: Path | None, task: str = "causal-lm", **options: Any) -> Run:
    given: dict[str, Any] = {
        "block_size": 16, "vocab_size": 300, "max_steps": 4, "dropout": 0.0, "packing": False,
        "per_device_train_batch_size": 4, "learning_rate": 1e-3, "corpus_bytes": 700_000,
        "config_overrides": NARROW[task],
    }  # fmt: skip
    named = None if path is None else str(path)
    return describe(FinetuneConfig(task=task, train_file=named, **{**given, **options}))  # type: ignore[arg-type]


def text_of(folder: Path, texts: list[str]) -> Path:
    path = folder / "t.txt"
    path.write_text("\n \n".join(texts) + "\n")
    return path


def joined(run: Run) -> list[list[int]]:
    """The documents of a causal model, as its sequences give them back."""
    found: list[list[int]] = [[]]
    for part in (run.job.train, run.job.eval):
        for row in part:
            found[-1] += row["input_ids"]
            if found[-1][-1] == run.tokenizer.eos_token_id:
                found.append([])
    return found[:-1]


def test_paragraphs_of_a_text_stay_apart(tmp_path: Path) -> None:
    texts = paragraphs()
    run = described(text_of(tmp_path, texts))
    assert [run.tokenizer.decode(ids[:-1]) for ids in joined(run)] == texts
    lengths = run.job.train.lengths()
    assert lengths.max() == 16 and 2 <= lengths.min() < 16
    assert run.train_tokens == sum(map(len, joined(run)))


def test_lines_that_end_as_on_windows(tmp_path: Path) -> None:
    texts = paragraphs()
    path = text_of(tmp_path, texts)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    run = described(path)
    assert [run.tokenizer.decode(ids[:-1]) for ids in joined(run)] == [
        text.replace("\n", "\r\n") for text in texts
    ]


def test_rows_of_a_table_stay_whole(tmp_path: Path) -> None:
    texts = ["first\n\nparagraph", *paragraphs(9)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    run = described(path, per_device_train_batch_size=1)
    assert [run.tokenizer.decode(ids[:-1]) for ids in joined(run)] == texts


def test_definitions_of_the_library_stay_apart() -> None:
    run = described(None, vocab_size=600)
    assert all("\n\n\n" not in text and text.strip() for text in run.sources[0].documents)
    starts = sum(t.startswith(("def ", "class ", "@")) for t in run.sources[0].documents)
    assert starts > len(run.sources[0].documents) / 4
    again = described(None, vocab_size=600)
    assert again.job.sha256() == run.job.sha256(), "tokens that were kept"


@pytest.mark.parametrize("task", NARROW)
def test_both_engines_have_one_loss(task: str, tmp_path: Path) -> None:
    job = described(text_of(tmp_path, paragraphs()), task).job
    found = {}
    for engine in ("onward", "torch"):
        (tmp_path / engine).mkdir()
        found[engine] = train(job, engine, tmp_path / engine, save_model=False)
    ours, eager = found["onward"], found["torch"]
    np.testing.assert_allclose(ours.step_losses, eager.step_losses, rtol=2e-5)
    assert ours.scores["perplexity"] == pytest.approx(eager.scores["perplexity"], rel=2e-5)


def test_padding_has_no_part_in_the_loss(tmp_path: Path) -> None:
    """A batch's loss is that of its documents one by one, without padding."""
    job = described(text_of(tmp_path, paragraphs())).job
    model: Any = build_model(job.config, job.model_config).eval()
    rows = [job.train[i] for i in range(7)]
    batch = job.collate()(rows)
    assert (batch["attention_mask"] == 0).any() and batch["input_ids"].shape[1] % 8 == 0
    assert torch.equal(batch["labels"][:, 1:] == IGNORED_LABEL, batch["attention_mask"][:, 1:] == 0)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row["input_ids"]])
            total += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
        found = float(model(**batch).loss)
    assert count == job.task.counted(batch)
    assert found == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["one text, short"], {"block_size": 64}, "the text makes only one sequence"),
        (paragraphs(), {"block_size": 4096}, "block_size 4096 is over the model's"),
        (paragraphs(), {"per_device_train_batch_size": 400}, "train sequences do not fill one"),
    ],
)
def test_what_cannot_run_is_said(
    texts: list[str], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        described(text_of(tmp_path, texts), **options)


def test_other_tasks_have_no_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--task", "text-classification", "--packing", "false"]) == 2
    assert "packing" in capsys.readouterr().err
