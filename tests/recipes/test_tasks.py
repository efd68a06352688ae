"""Tasks of `onward finetune`: batches and losses are those of transformers and eager PyTorch,
scores those of the usual packages, and each learns more than its baseline."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.cli import main
from onward.recipes.describe import Run, describe
from onward.recipes.loop import Job, train
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.report.run_data import SCORES
from onward.recipes.samples import Samples
from onward.recipes.tasks import IGNORED_LABEL, TASKS, Baseline
from onward.recipes.tasks.labelled import accuracy, macro_f1
from onward.recipes.tasks.question_answering import exact_match, word_f1
from onward.recipes.tasks.task import label_names

SMALL: dict[str, Any] = {
    "corpus_bytes": 1_500_000, "vocab_size": 600, "max_steps": 3, "dropout": 0.0,
    "max_eval_samples": 21, "max_train_samples": 64, "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 3, "learning_rate": 1e-3, "logging_steps": 2,
    "config_overrides": "hidden_size=32,num_attention_heads=2,intermediate_size=48",
}  # fmt: skip
NARROW = {
    "causal-lm": "n_embd=32,n_head=2",
    "seq2seq-lm": "d_model=32,num_heads=2,d_kv=16,d_ff=48",
    "text-denoising": "d_model=32,num_heads=2,d_kv=16,d_ff=48",
    "automatic-speech-recognition": "d_model=32,encoder_layers=1,encoder_attention_heads=2,"
    "decoder_attention_heads=2,encoder_ffn_dim=48,decoder_ffn_dim=48",
}


def small(task: str, **options: Any) -> FinetuneConfig:
    overrides = NARROW.get(task, SMALL["config_overrides"])
    given = {"task": task, **SMALL, "config_overrides": overrides, **options}
    if task == "image-classification":
        del given["vocab_size"]
    return FinetuneConfig(**given)


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {}


def described(runs: dict[str, Run], task: str) -> Run:
    if task not in runs:
        runs[task] = describe(small(task))
    return runs[task]


@pytest.mark.parametrize("task", TASKS)
def test_both_engines_have_one_loss_and_one_score(
    task: str, runs: dict[str, Run], tmp_path: Path
) -> None:
    job = described(runs, task).job
    found = {}
    for engine in ("onward", "torch"):
        (tmp_path / engine).mkdir()
        found[engine] = train(job, engine, tmp_path / engine, save_model=False)
    ours, eager = found["onward"], found["torch"]
    np.testing.assert_allclose(ours.step_losses, eager.step_losses, rtol=2e-5)
    assert ours.eval_loss == pytest.approx(eager.eval_loss, rel=2e-5)
    assert ours.scores.keys() == eager.scores.keys() and job.task.preset
    for name, value in ours.scores.items():
        assert value == pytest.approx(eager.scores[name], rel=2e-5, abs=0.05)  # one sample of 21
    assert described(runs, task).baseline.metric in ours.scores
    assert ours.scores.keys() <= set(SCORES), "scores that a report leaves out"


# the loss of question answering is a softmax over all positions of a batch, padding too; that of
# BERT's pre-training a sum of means over two things; retrieval compares the pairs of a batch
SEVERAL = ("question-answering", "bert-pretraining", "text-retrieval")
OF_ONE_MEAN = [task for task in TASKS if task not in SEVERAL]


@pytest.mark.parametrize("task", OF_ONE_MEAN)
def test_a_window_is_one_large_batch(task: str, runs: dict[str, Run], tmp_path: Path) -> None:
    job = described(runs, task).job
    whole = dataclasses.replace(
        job.config, gradient_accumulation_steps=1, per_device_train_batch_size=6
    )
    losses = []
    for config in (job.config, whole):
        made = dataclasses.replace(job, config=config)
        losses.append(train(made, "torch", tmp_path, save_model=False).step_losses)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_a_job_survives_the_way_to_another_process(
    task: str, runs: dict[str, Run], tmp_path: Path
) -> None:
    job = described(runs, task).job
    job.save(tmp_path)
    again = Job.load(tmp_path)
    assert again.sha256() == job.sha256() and again.config == job.config
    for part, other in ((job.train, again.train), (job.eval, again.eval)):
        assert [row.keys() for row in part] == [row.keys() for row in other]
        for row, same in zip(part, other, strict=True):
            assert all(np.array_equal(row[name], same[name]) for name in row)
    rows = [job.train[i] for i in range(4)]
    np.random.seed(0)
    torch.manual_seed(0)
    first = job.task.collate(job.processor, job.config)(
        [job.task.draw(job.train, job.processor, job.config)(row) for row in rows]
    )
    np.random.seed(0)
    torch.manual_seed(0)
    second = again.task.collate(again.processor, again.config)(
        [again.task.draw(again.train, again.processor, again.config)(row) for row in rows]
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert label_names(again.model_config) == label_names(job.model_config)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["masked-lm", "text-classification", "bert-pretraining"])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_goes_on_to_the_bit(task: str, workers: str, tmp_path: Path) -> None:
    """What a task draws at random, and batches of many lengths, are those of one run."""
    out = tmp_path / "out"
    words = ["finetune", "--task", task, "--corpus_bytes", "700000", "--vocab_size", "400"]
    words += ["--max_steps", "4", "--save_steps", "2", "--max_train_samples", "20", "--dropout"]
    words += ["0.1", "--config_overrides", SMALL["config_overrides"], "--max_eval_samples", "9"]
    words += ["--dataloader_num_workers", workers, "--output_dir", str(out)]
    assert main(words) == 0
    whole = {name: (out / name).read_bytes() for name in ("model.safetensors", "eval_results.json")}
    for path in (*out.glob("*.safetensors"), out / "eval_results.json", out / "model.onnx"):
        path.unlink()
    shutil.rmtree(out / "checkpoint-4")
    assert main(words) == 0
    assert (out / "model.safetensors").read_bytes() == whole["model.safetensors"]
    kept = [
        json.loads(whole["eval_results.json"]),
        json.loads((out / "eval_results.json").read_text()),
    ]
    assert kept[0]["eval_loss"] == kept[1]["eval_loss"]
    assert kept[0]["train_loss"] == kept[1]["train_loss"]


def test_a_decoder_classifies_too(tmp_path: Path) -> None:
    """A tokenizer without padding pads by its end, which the model is told."""
    rows = [{"text": "def f(x):" * (1 + i % 3), "label": "ab"[i % 2]} for i in range(24)]
    for model in ("gpt2-tiny", "llama-tiny"):
        overrides = (
            "n_embd=32,n_head=2"
            if model == "gpt2-tiny"
            else ("hidden_size=32,intermediate_size=48,num_attention_heads=2,num_key_value_heads=1")
        )
        job = labelled(
            tmp_path, rows, "text-classification", model_name_or_path=model,
            config_overrides=overrides,
        ).job  # fmt: skip
        assert job.model_config.pad_token_id == job.tokenizer.pad_token_id is not None
        found = [train(job, engine, tmp_path, save_model=False) for engine in ("onward", "torch")]
        np.testing.assert_allclose(found[0].step_losses, found[1].step_losses, rtol=2e-5)
        assert found[0].scores == found[1].scores


# the updates after which each is better than its baseline
STEPS = {
    "causal-lm": 60, "masked-lm": 400, "text-classification": 150, "token-classification": 60,
    "question-answering": 150, "multiple-choice": 200, "seq2seq-lm": 200, "text-retrieval": 60,
    "image-classification": 100, "automatic-speech-recognition": 100, "text-denoising": 100,
    "bert-pretraining": 500,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("task", STEPS)
def test_real_text_is_learnt_better_than_the_baseline(task: str, tmp_path: Path) -> None:
    words = ["--task", task, "--max_steps", str(STEPS[task]), "--max_eval_samples", "200"]
    words += ["--save_strategy", "no", "--warmup_ratio", "0.1", "--dropout", "0"]
    if task in ("masked-lm", "text-denoising", "bert-pretraining"):
        words += ["--vocab_size", "500", "--block_size", "64", "--learning_rate", "3e-3"]
        words += ["--per_device_train_batch_size", "16"]
    elif task not in ("image-classification", "automatic-speech-recognition"):
        words += ["--vocab_size", "1000"]
    assert main(["finetune", *words, "--output_dir", str(tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    record = json.loads((tmp_path / "out" / "run_config.json").read_text())
    baseline = Baseline(**record["baseline"])
    assert baseline.is_beaten(results[baseline.metric]), (results, baseline)


# ---- samples and their labels


def table_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def labelled(tmp_path: Path, rows: list[dict[str, Any]], task: str, **options: Any) -> Run:
    file = table_file(tmp_path / "train.jsonl", rows)
    given = {"max_train_samples": None, "max_eval_samples": None, **options}
    return describe(small(task, train_file=file, validation_file=file, **given))


def test_labels_keep_their_names_and_pairs_their_order(tmp_path: Path) -> None:
    rows = [
        {"sentence1": f"def f{i}():", "sentence2": "return None", "label": ["no", "yes"][i % 2]}
        for i in range(12)
    ]
    job = labelled(tmp_path, rows, "text-classification").job
    assert job.model_config.id2label == {0: "no", 1: "yes"}
    assert [row["labels"] for row in job.train] == [0, 1] * 6
    for row, sample in zip(rows, job.train, strict=True):
        pair = job.tokenizer(row["sentence1"], row["sentence2"])
        assert sample["input_ids"] == pair["input_ids"]
        assert sample["token_type_ids"] == pair["token_type_ids"]


def test_numbers_are_predicted_as_numbers(tmp_path: Path) -> None:
    rows = [{"text": "x" * i, "label": i / 2} for i in range(1, 13)]
    run = labelled(tmp_path, rows, "text-classification")
    assert run.job.model_config.num_labels == 1
    assert run.job.model_config.problem_type == "regression"
    values = np.arange(1, 13) / 2
    assert run.baseline.value == pytest.approx(values.var()) and run.baseline.metric == "mse"
    result = train(run.job, "onward", tmp_path, save_model=False)
    assert set(result.scores) == {"mse", "pearson"}
    assert result.scores["mse"] == pytest.approx(result.eval_loss, rel=1e-5)


def test_whole_numbers_are_labels_in_their_order(tmp_path: Path) -> None:
    rows = [{"text": "abc", "label": label} for label in (10, 9, 2, 10, 2, 9, 2)]
    job = labelled(tmp_path, rows, "text-classification", per_device_train_batch_size=1).job
    assert list(label_names(job.model_config).values()) == ["2", "9", "10"]
    assert [row["labels"] for row in job.train] == [2, 1, 0, 2, 0, 1, 0]


@pytest.mark.parametrize("labels", [("--1", "-", "x"), (10**400, 2), ("nan", "inf", "1e5")])
def test_odd_labels_are_names(labels: tuple[Any, ...], tmp_path: Path) -> None:
    rows = [{"text": "abc", "label": label} for label in labels * 3]
    job = labelled(tmp_path, rows, "text-classification", per_device_train_batch_size=1).job
    names = label_names(job.model_config)
    assert [names[row["labels"]] for row in job.train] == [str(label) for label in labels * 3]


def test_a_baseline_is_of_the_samples_that_are_evaluated(tmp_path: Path) -> None:
    rows = [{"text": "abc", "label": label} for label in "aaabbb"]
    run = labelled(
        tmp_path, rows, "text-classification", max_eval_samples=2, per_device_train_batch_size=1
    )
    assert run.baseline.value == 1.0 and len(run.job.eval) == 2


def test_only_the_first_token_of_a_word_has_its_label(tmp_path: Path) -> None:
    rows = [{"tokens": ["unfathomable", "x", "="], "tags": ["B-A", "I-A", "O"]}] * 8
    job = labelled(tmp_path, rows, "token-classification").job
    row = job.train[0]
    encoded = job.tokenizer(rows[0]["tokens"], is_split_into_words=True)
    assert row["input_ids"] == encoded["input_ids"]
    names, seen = label_names(job.model_config), set[int | None]()
    for word, label in zip(encoded.word_ids(), row["labels"], strict=True):
        if word is None or word in seen:
            assert label == IGNORED_LABEL
        else:
            assert names[label] == rows[0]["tags"][word]
        seen.add(word)
    assert seen >= {0, 1, 2}


def test_lists_in_texts_are_the_lists_that_were_written(tmp_path: Path) -> None:
    """CSV by pandas (lists of Python), by `datasets` (arrays of numpy) and with JSON."""
    datasets = pytest.importorskip("datasets")
    import pandas

    rows = [
        {"tokens": ["EU", "rejects", "it's", 'a "call"', "\\d", "[", "caf\u00e9"],
         "tags": ["B-ORG", "O", "O", "O", "O", "O", "O"]},
        {"tokens": ["[", "x", "]"], "tags": ["O", "O", "O"]},
        {"tokens": [f"word{i}" for i in range(60)], "tags": ["O", "B-ORG"] * 30},
        {"tokens": ["one"], "tags": ["O"]},
    ] * 2  # fmt: skip
    pandas.DataFrame(rows).to_csv(tmp_path / "pandas.csv", index=False)
    datasets.Dataset.from_list(rows).to_csv(str(tmp_path / "datasets.csv"))
    texts = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    pandas.DataFrame(texts).to_csv(tmp_path / "json.csv", index=False)
    plain = [{name: " ".join(value) for name, value in row.items()} for row in rows[1:4] * 3]
    jobs = {}
    for name in ("pandas.csv", "datasets.csv", "json.csv"):
        file = str(tmp_path / name)
        jobs[name] = describe(
            small("token-classification", train_file=file, validation_file=file, vocab_size=320,
                  max_train_samples=None, max_eval_samples=None)
        ).job  # fmt: skip
    want = labelled(tmp_path, rows, "token-classification", vocab_size=320).job
    names = label_names(want.model_config)
    assert names == {0: "B-ORG", 1: "O"}
    for job in jobs.values():
        assert label_names(job.model_config) == names
        for found, row in zip(job.train, rows, strict=True):
            tokenizer: Any = job.tokenizer
            size = len(found["input_ids"])
            encoded = tokenizer(
                row["tokens"], is_split_into_words=True, truncation=True, max_length=size
            )
            assert found["input_ids"] == encoded["input_ids"]
        assert [row["labels"][:2] for row in job.train] == [row["labels"][:2] for row in want.train]
    sentences = labelled(tmp_path, plain, "token-classification", vocab_size=320).job
    tokenizer = sentences.tokenizer
    assert (
        sentences.train[0]["input_ids"]
        == tokenizer(["[", "x", "]"], is_split_into_words=True)["input_ids"]
    ), "a sentence in brackets is no list"


@pytest.mark.parametrize("text", ["['EU', nan]", "['a''b']", '["a", b]', "['a', ['b']]", "['\\x']"])
def test_lists_that_cannot_be_read_are_refused(text: str, tmp_path: Path) -> None:
    rows = [{"tokens": text, "tags": "O O"}] * 8
    with pytest.raises(InputError, match=r"which is no list of words, in .*line 1"):
        labelled(tmp_path, rows, "token-classification")


def test_an_answer_is_found_in_every_piece_that_holds_it(tmp_path: Path) -> None:
    context = " ".join(f"word{i}" for i in range(60))
    rows = [
        {
            "question": f"Which word is number {i}?", "context": context,
            "answers": {"text": [f"word{i}"], "answer_start": [context.index(f"word{i}")]},
        }
        for i in range(10, 60, 5)
    ]  # fmt: skip
    run = labelled(
        tmp_path, rows, "question-answering", max_seq_length=64, doc_stride=16, vocab_size=320
    )
    job, found = run.job, 0
    assert len(job.train) >= 2 * len(rows)
    for row in job.eval:
        answer = "".join(map(chr, row["_answers"]))
        first, last = row["start_positions"], row["end_positions"]
        told = str(job.tokenizer.decode(row["input_ids"][first : last + 1])).replace(" ", "")
        if first:
            assert told == answer
            found += 1
        else:
            offsets = np.array(row["_offsets"]).reshape(-1, 2)
            seen = context[offsets[offsets[:, 1] > 0][0, 0] : offsets[:, 1].max()]
            assert answer not in seen.split()
    assert found >= len(rows)
    # a model that points at the right tokens has the best score
    starts = torch.full((len(job.eval), 64), -9.0)
    ends = starts.clone()
    for i, row in enumerate(job.eval):
        if row["start_positions"]:
            starts[i, row["start_positions"]] = ends[i, row["end_positions"]] = 9.0
    told = job.task.predictions(list(job.eval), {}, {"start_logits": starts, "end_logits": ends})
    assert job.task.scores(told, 0.0, job.model_config) == {"exact_match": 100.0, "f1": 100.0}


def test_choices_are_grouped_again_in_a_batch(tmp_path: Path) -> None:
    rows = [{"question": "f", "choices": ["a", "b c d", "e"], "label": i % 3} for i in range(9)]
    job = labelled(tmp_path, rows, "multiple-choice").job
    batch = job.first_batch(job.train, 2)
    assert batch["input_ids"].shape == (2, 3, 8) and batch["labels"].tolist() == [0, 1]
    want = job.tokenizer("f", "b c d")["input_ids"]
    assert batch["input_ids"][1, 1, : len(want)].tolist() == want


def test_hidden_tokens_are_others_in_each_epoch_and_alike_in_each_run(runs: dict[str, Run]) -> None:
    from onward.recipes.loop import update_batches

    job = described(runs, "masked-lm").job
    drawn = job.drawn(job.train)

    def labels() -> list[np.ndarray]:
        loader = update_batches(drawn, 64, seed=1)
        return [
            np.stack(
                [row["labels"] for row in sorted(rows, key=lambda r: r["input_ids"].tobytes())]
            )
            for _ in range(2)
            for rows in loader
        ]

    first, second = labels(), labels()
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    assert (first[0] != first[1]).any()
    share = (np.concatenate(first) != IGNORED_LABEL).mean()
    assert share == pytest.approx(job.config.mlm_probability, abs=0.01)
    ids = np.stack([row["input_ids"] for row in job.train])
    assert (ids[:, 0] == job.tokenizer.cls_token_id).all()
    assert (ids[:, -1] == job.tokenizer.sep_token_id).all()


# ---- scores


def test_scores_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(20):
        told, true = rng.integers(0, 5, (2, 40)).tolist()
        pairs = list(zip(told, true, strict=True))
        assert accuracy(pairs) == pytest.approx(metrics.accuracy_score(true, told))
        assert macro_f1(pairs) == pytest.approx(
            metrics.f1_score(true, told, average="macro", zero_division=0)
        )


def test_answers_are_compared_as_by_torchmetrics() -> None:
    text = pytest.importorskip("torchmetrics.text")
    words = ["the", "a", "cat", "Cat.", "sat", "on", "mat", "!", "An", "hour"]
    rng = np.random.default_rng(0)
    for _ in range(100):
        told, true = (" ".join(rng.choice(words, rng.integers(1, 5))) for _ in range(2))
        metric = text.SQuAD()
        found = metric(
            [{"prediction_text": told, "id": "0"}],
            [{"answers": {"text": [true], "answer_start": [0]}, "id": "0"}],
        )
        assert 100 * exact_match(told, true) == pytest.approx(float(found["exact_match"]))
        assert 100 * word_f1(told, true) == pytest.approx(float(found["f1"]), abs=1e-4)


def test_entities_are_scored_by_seqeval() -> None:
    metrics = pytest.importorskip("seqeval.metrics")
    names = {0: "O", 1: "B-X", 2: "I-X", 3: "B-Y", 4: "I-Y"}
    rng = np.random.default_rng(0)
    told = [([int(v) for v in rng.integers(0, 5, 9)], [int(v) for v in rng.integers(0, 5, 9)])]

    class Config:
        id2label = names

    found = TASKS["token-classification"].scores(told, 0.0, Config())  # type: ignore[arg-type]
    words = [[[names[v] for v in one[i]] for one in told] for i in (0, 1)]
    assert found["f1"] == pytest.approx(metrics.f1_score(words[1], words[0], zero_division=0))


# ---- what is refused

ROW = {"text": "abc", "label": "x"}
SQUAD = {"question": "q", "context": "abc", "answers": {"text": ["b"], "answer_start": [1]}}
REFUSED: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], str]] = {
    "one label": ("text-classification", [ROW, ROW], {}, "all examples have the label 'x'"),
    "no label": (
        "text-classification", [ROW, {**ROW, "label": None}], {},
        "column 'label' has nothing, in {}, line 2",
    ),
    "an empty label": (
        "text-classification", [ROW, {**ROW, "label": ""}], {},
        "column 'label' is empty, in {}, line 2",
    ),
    "a list as text": (
        "text-classification", [ROW, {**ROW, "text": [1]}], {},
        "column 'text' has [1], in {}, line 2",
    ),
    "another column": (
        "text-classification", [ROW], {"text_column": "body"}, "there is no column 'body'",
    ),
    "words without labels": (
        "token-classification", [{"tokens": ["a", "b"], "tags": ["x"]}], {},
        "2 words with 1 labels, in {}, line 1",
    ),
    "words without tokens": (
        "token-classification", [{"tokens": [""], "tags": ["x"]}] * 8, {},
        "no word has a token, so that there is nothing to label, in {}",
    ),
    "an answer elsewhere": (
        "question-answering", [{**SQUAD, "answers": {"text": ["b"], "answer_start": [0]}}], {},
        "the answer 'b' does not stand at 0 in the passage, in {}, line 1",
    ),
    "no answers": (
        "question-answering", [{**SQUAD, "answers": "b"}], {},
        "column 'answers' has 'b', in {}, line 1",
    ),
    "no room": (
        "question-answering", [{**SQUAD, "question": "q " * 50}], {"max_seq_length": 20},
        "leaves no room for a passage in 20 tokens",
    ),
    "fewer choices": (
        "multiple-choice",
        [{"question": "q", "choices": c, "label": 0} for c in (["a", "b", "c"], ["a", "b"])], {},
        "2 choices, where others have 3, in {}, line 2",
    ),
    "no such choice": (
        "multiple-choice", [{"question": "q", "choices": ["a", "b"], "label": 2}], {},
        "2 is no number of a choice, in {}, line 1",
    ),
    "too long": (
        "text-classification", [ROW, {**ROW, "label": "y"}], {"max_seq_length": 513},
        "max_seq_length 513 is over the model's 512 positions",
    ),
    "a switch of another task": (
        "text-classification", [ROW], {"doc_stride": 3},
        "task text-classification has no doc_stride, in --doc_stride; fix: leave it out, or give "
        "--task question-answering",
    ),
    "an axis": (
        "text-classification", [ROW, {**ROW, "label": "y"}] * 9, {"mesh": "pp=2"},
        "task text-classification has no batches that pp can cut",
    ),
    "another model": (
        "seq2seq-lm", [{"text": "a", "summary": "b"}],
        {"model_name_or_path": "bert-tiny", "config_overrides": None},
        "model 'bert-tiny' (bert) is not a model for seq2seq-lm, in --model_name_or_path; fix: "
        "name a model that AutoModelForSeq2SeqLM can load, such as t5-tiny, or give --task",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_learnt_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    task, rows, options, told = REFUSED[name]
    with pytest.raises(InputError) as caught:
        labelled(tmp_path, rows, task, **options)
    line = str(caught.value)
    assert told.format(tmp_path / "train.jsonl") in line and "; fix: " in line, line
    assert "\n" not in line


def test_a_label_of_the_evaluation_alone_is_refused(tmp_path: Path) -> None:
    rows = [{"text": "abc", "label": label} for label in "xyxyxy"]
    train_file = table_file(tmp_path / "train.jsonl", rows)
    held = table_file(tmp_path / "eval.jsonl", [*rows, {"text": "abc", "label": "z"}])
    with pytest.raises(
        InputError, match=r"label 'z' is not in the train file, in .*eval\.jsonl, line 7"
    ):
        describe(small("text-classification", train_file=train_file, validation_file=held))


def test_columns_of_two_sizes_are_no_samples() -> None:
    with pytest.raises(ValueError, match="columns of"):
        Samples({"a": np.zeros(2), "b": np.zeros(3)})
    rows = [{"a": [1, 2], "b": 0.5}, {"a": [3], "b": 1.5}]
    samples = Samples.of_rows(rows)
    assert list(samples) == rows and samples.lengths("a").tolist() == [2, 1]
    assert list(samples.first(1)) == rows[:1]
    assert list(samples.chosen(np.array([1, 0]))) == rows[::-1]
