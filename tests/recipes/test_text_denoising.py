"""Hidden spans: what is seen and what is written make the text again, as T5 and BART have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.recipes.describe import describe
from onward.recipes.loop import train
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.tasks.text_denoising import spans_marked, spans_masked

NARROW = "d_model=32,num_heads=2,d_kv=16,d_ff=48"
FIRST = 1000  # of the marks below


def config(**options: Any) -> FinetuneConfig:
    given = {
        "corpus_bytes": 400_000, "vocab_size": 500, "max_steps": 2, "max_eval_samples": 9,
        "config_overrides": NARROW, "dropout": 0.0, "per_device_train_batch_size": 3,
        "block_size": 40,
    }  # fmt: skip
    return FinetuneConfig(**{"task": "text-denoising", **given, **options})


@pytest.mark.parametrize(
    ("size", "hidden", "spans"), [(20, 3, 1), (20, 6, 3), (20, 10, 10), (2, 1, 1), (512, 77, 26)]
)
def test_marks_and_spans_make_the_text_again(size: int, hidden: int, spans: int) -> None:
    np.random.seed(0)
    ids = np.arange(size)
    marks = FIRST + np.arange(spans)
    starts = set()
    for _ in range(50):
        seen, told = spans_marked(ids, hidden, spans, marks)
        assert len(seen) == size - hidden + spans and len(told) == hidden + spans
        assert told[0] == FIRST and seen[0] == 0, "a text begins with what can be seen"
        covered: dict[int, list[int]] = {}
        for token in told.tolist():
            if token >= FIRST:
                covered[mark := token] = []
            else:
                covered[mark].append(token)
        assert list(covered) == marks.tolist() and all(covered.values())
        again = [t for token in seen.tolist() for t in covered.get(token, [token])]
        assert again == ids.tolist()
        starts.add(tuple(seen.tolist()))
    assert len(starts) > 1 or size == 2 * spans


@pytest.mark.parametrize(("size", "hidden", "mean"), [(20, 3, 3.0), (20, 10, 1.0), (200, 60, 3.0)])
def test_a_mask_stands_for_a_span(size: int, hidden: int, mean: float) -> None:
    np.random.seed(0)
    lengths = []
    for _ in range(200):
        seen = spans_masked(np.arange(size), hidden, mean, FIRST)
        visible = seen[seen != FIRST]
        assert len(visible) == size - hidden and (np.diff(visible) > 0).all()
        masks = int((seen == FIRST).sum())
        lengths.append(hidden / masks)
    assert np.mean(lengths) == pytest.approx(mean, rel=0.5)


def test_the_tokenizer_of_t5_marks_spans() -> None:
    run = describe(config())
    job, tokenizer = run.job, run.tokenizer
    draw = job.task.draw(job.train, tokenizer, job.config)
    np.random.seed(1)
    row = draw(job.train[0])
    marks = [tokenizer.convert_tokens_to_ids(f"<extra_id_{n}>") for n in range(2)]
    assert [i for i in row["input_ids"] if i in marks] == marks
    assert row["labels"][0] == marks[0]
    assert row["input_ids"][-1] == row["labels"][-1] == tokenizer.eos_token_id
    # 6 of 40 tokens in 2 spans, and an end
    assert len(row["input_ids"]) == 40 - 6 + 2 + 1 and len(row["labels"]) == 6 + 2 + 1
    targets = [draw(row)["labels"] for row in (*job.train, *job.eval)]
    tokens, counts = np.unique(np.concatenate(targets), return_counts=True)
    # the entropy of what is drawn, marks and ends too
    shares = counts / counts.sum()
    drawn = np.exp(-(shares * np.log(shares)).sum())
    assert run.baseline.value == pytest.approx(drawn, rel=0.1) and len(tokens) > 50


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BartConfig, BartForConditionalGeneration

    from onward.recipes.trained_tokenizer import trained_tokenizer

    folder = tmp_path_factory.mktemp("bart")
    text = (Path(np.__file__).parent / "__init__.py").read_text(encoding="utf-8")
    tokenizer = trained_tokenizer([text], 400, 128, "roberta")
    tokenizer.save_pretrained(folder)
    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 48))
    }
    ids = {
        name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")
    }
    made = BartConfig(
        vocab_size=len(tokenizer), d_model=32, max_position_embeddings=128, dropout=0.0,
        decoder_start_token_id=ids["eos_token_id"], forced_eos_token_id=None, **sizes, **ids,
    )  # fmt: skip
    BartForConditionalGeneration(made).save_pretrained(folder)
    return folder


def test_bart_writes_the_whole_text(bart: Path, tmp_path: Path) -> None:
    options = {"model_name_or_path": str(bart), "vocab_size": None, "config_overrides": None}
    job = describe(config(**options)).job
    tokenizer: Any = job.tokenizer
    draw = job.task.draw(job.train, tokenizer, job.config)
    row = draw(job.train[0])
    assert row["labels"] == [
        tokenizer.bos_token_id, *job.train[0]["input_ids"].tolist(), tokenizer.eos_token_id
    ]  # fmt: skip
    assert row["input_ids"].count(tokenizer.mask_token_id) >= 1
    batch = job.first_batch(job.train, 3)
    assert batch["input_ids"].shape[1] % 8 == 0 and "attention_mask" in batch
    found = [train(job, e, tmp_path, save_model=False).step_losses for e in ("onward", "torch")]
    np.testing.assert_allclose(found[0], found[1], rtol=2e-5)


def test_a_tokenizer_that_hides_nothing_is_refused(bart: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from onward.recipes.corpus import train_tokenizer

    plain = train_tokenizer(["some text " * 50], 300, 128)
    assert isinstance(plain, PreTrainedTokenizerFast)
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(InputError, match="neither <extra_id_0> nor a mask token"):
        describe(config(tokenizer_name=str(tmp_path / "plain")))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mean_span_length": 0.5}, "mean_span_length is 0.5"),
        ({"block_size": 2, "mlm_probability": 0.9}, "leave none of a block"),
        ({"block_size": 510, "mlm_probability": 0.5, "mean_span_length": 1.0}, "has 100 marks"),
        ({"task": "masked-lm", "mean_span_length": 2.0, "config_overrides": None}, "has no mean"),
    ],
)
def test_spans_that_cannot_be_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        describe(config(**options))
