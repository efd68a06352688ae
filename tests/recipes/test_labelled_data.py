"""Tables of labelled texts: which columns, labels, words and places become a model's inputs. The
oracles are transformers' tokenizers and models, and the rules of its example scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onward.recipes.corpus import train_tokenizer
from onward.recipes.describe import Run, describe
from onward.recipes.finetune import summary
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.start_model import build_model
from onward.recipes.tasks.task import label_names
from onward.recipes.trained_tokenizer import trained_tokenizer

Rows = list[dict[str, Any]]
NARROW = "hidden_size=32,num_attention_heads=2,intermediate_size=48,num_hidden_layers=1"
SMALL: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 1, "use_cpu": True}


def described(tmp_path: Path, rows: Rows, task: str, **options: Any) -> Run:
    """The run of a task on these rows, from scratch where no model is named."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = {**SMALL, "train_file": str(file), "validation_file": str(file), **options}
    if "model_name_or_path" not in given:
        given["config_overrides"] = NARROW
        if "tokenizer_name" not in given:
            given["vocab_size"] = 400
    return describe(FinetuneConfig(task=task, **given))  # type: ignore[arg-type]


def bert_tokenizer(text: str) -> Any:
    return trained_tokenizer([text], 400, 64, "bert")


def padding_in_front(folder: Path, text: str) -> str:
    """The folder of a tokenizer that pads in front."""
    bert_tokenizer(text).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "padding_side": "left"}))
    return str(folder)


def bert_folder(folder: Path, text: str, **config: Any) -> Path:
    """A tiny classifier with its tokenizer, as save_pretrained writes them."""
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = bert_tokenizer(text)
    tokenizer.save_pretrained(folder)
    given = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
        "pad_token_id": tokenizer.pad_token_id, **config,
    }  # fmt: skip
    BertForSequenceClassification(BertConfig(**given)).save_pretrained(folder)
    return folder


# ---- questions without an answer


def questions() -> Rows:
    """Eight questions on one passage; every other one has no answer."""
    context = " ".join(f"word{i}" for i in range(40))
    rows: Rows = []
    for i in range(8):
        text = f"word{5 * i}"
        there = {"text": [text], "answer_start": [context.index(text)]}
        answers = there if i % 2 else {"text": [], "answer_start": []}
        rows.append({"question": f"which is {i}?", "context": context, "answers": answers})
    return rows


SHORT: dict[str, Any] = {"max_seq_length": 48, "doc_stride": 8, "max_train_samples": None}


def test_an_empty_answer_is_predicted_where_it_scores_above_every_span(tmp_path: Path) -> None:
    """The rule of transformers' example for SQuAD 2, applied here to all spans of all pieces."""
    rows = questions()
    run = described(tmp_path, rows, "question-answering", **SHORT)
    job, generator = run.job, torch.Generator().manual_seed(0)
    assert "8 of 16 questions have no answer" in run.facts[0] and run.facts[0] in summary(run)
    pieces = list(job.eval)
    assert len(pieces) > len(rows)
    seen: set[tuple[bool, bool]] = set()
    for lift in (0.0, 5.0, 6.0, 7.0):
        shape = (len(pieces), 48)
        starts, ends = (torch.randn(shape, generator=generator) for _ in range(2))
        starts[:, 0] += lift
        outputs = {"start_logits": starts, "end_logits": ends}
        found = job.task.scores(job.task.predictions(pieces, {}, outputs), 0.0, job.model_config)
        kinds: dict[bool, list[float]] = {True: [], False: []}
        for number, row in enumerate(rows):
            own = [n for n, piece in enumerate(pieces) if piece["_question"] == number]
            none = min(float(starts[n, 0] + ends[n, 0]) for n in own)
            best, told = float("-inf"), ""
            for n in own:
                offsets = np.array(pieces[n]["_offsets"]).reshape(-1, 2)
                inside = np.flatnonzero(offsets[:, 1])
                for i in inside:
                    for j in inside[(inside >= i) & (inside < i + 30)]:
                        score = float(starts[n, i] + ends[n, j])
                        if score > best:
                            best, told = score, row["context"][offsets[i, 0] : offsets[j, 1]]
            told = "" if none > best else told
            has_answer = bool(row["answers"]["text"])
            kinds[has_answer].append(float([told] == (row["answers"]["text"] or [""])))
            seen.add((has_answer, told == ""))
        assert found["HasAns_exact"] == 100 * np.mean(kinds[True])
        assert found["NoAns_exact"] == found["NoAns_f1"] == 100 * np.mean(kinds[False])
        assert found["exact_match"] == 100 * np.mean(kinds[True] + kinds[False])
    assert len(seen) == 4, "each kind of question with and without a predicted answer"


def test_a_table_whose_questions_all_have_answers_has_a_span_for_each(tmp_path: Path) -> None:
    run = described(tmp_path, questions()[1::2], "question-answering", **SHORT)
    job, pieces = run.job, list(run.job.eval)
    logits = torch.zeros(len(pieces), 48)
    logits[:, 0] = 9.0
    told = job.task.predictions(pieces, {}, {"start_logits": logits, "end_logits": logits})
    scores = job.task.scores(told, 0.0, job.model_config)
    assert set(scores) == {"exact_match", "f1"} and all(one[2] for one in told)
    assert "every question has an answer" in run.facts[0]


def test_no_answer_is_a_baseline_too(tmp_path: Path) -> None:
    run = described(tmp_path, questions(), "question-answering", **SHORT)
    assert run.baseline.value == 50 and run.baseline.of == "no answer to any question"


@pytest.mark.parametrize("empty", [{"text": "", "answer_start": -1}, {"text": [""],
                                    "answer_start": [0]}])  # fmt: skip
def test_spellings_of_no_answer(empty: dict[str, Any], tmp_path: Path) -> None:
    rows = questions()
    for row in rows[::2]:
        row["answers"] = empty
    run = described(tmp_path, rows, "question-answering", **SHORT)
    assert "8 of 16 questions have no answer" in run.facts[0]
    pieces = [row for row in run.job.eval if row["_question"] % 2 == 0]
    assert {(row["start_positions"], row["end_positions"]) for row in pieces} == {(0, 0)}


def test_no_answer_is_at_the_token_of_a_class_wherever_that_is(text: str, tmp_path: Path) -> None:
    """XLNet's tokenizer, for one, has it at the end."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = bert_tokenizer(text)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A [SEP] [CLS]",
        pair="$A [SEP] $B:1 [SEP]:1 [CLS]:1",
        special_tokens=[(t, tokenizer.convert_tokens_to_ids(t)) for t in ("[SEP]", "[CLS]")],
    )
    tokenizer.save_pretrained(tmp_path / "last")
    given = {**SHORT, "tokenizer_name": str(tmp_path / "last")}
    job = described(tmp_path, questions(), "question-answering", **given).job
    for row in job.eval:
        last = len(row["input_ids"]) - 1
        assert row["_null"] == last and row["input_ids"][last] == tokenizer.cls_token_id
        assert row["_question"] % 2 or row["start_positions"] == row["end_positions"] == last


# ---- padding


def test_answers_stand_where_a_tokenizer_that_pads_in_front_has_them(
    text: str, tmp_path: Path
) -> None:
    rows = questions()[1::2]
    for i, row in enumerate(rows):
        row["question"] += " and" * 3 * i  # of several lengths
    folder = padding_in_front(tmp_path / "left", text)
    given = {**SHORT, "tokenizer_name": folder, "max_seq_length": 45}  # no multiple of 8
    run = described(tmp_path, rows, "question-answering", **given)
    job = run.job
    assert job.tokenizer.padding_side == "left"
    batch = job.first_batch(job.eval, len(job.eval))
    assert bool((batch["attention_mask"] == 0).any()), "a batch with padding"
    found = 0
    for ids, first, last, row in zip(
        batch["input_ids"], batch["start_positions"], batch["end_positions"], job.eval, strict=True
    ):
        if first:
            told = str(job.tokenizer.decode(ids[first : last + 1].tolist())).strip()
            assert told == "".join(map(chr, row["_answers"]))
            found += 1
    assert found >= len(rows)
    # logits of the padded batch are read where the tokens are
    starts, ends = (torch.full(batch["input_ids"].shape, -9.0) for _ in range(2))
    for n in range(len(starts)):
        if batch["start_positions"][n]:
            starts[n, batch["start_positions"][n]] = ends[n, batch["end_positions"][n]] = 9.0
    told = job.task.predictions(list(job.eval), batch, {"start_logits": starts, "end_logits": ends})
    assert job.task.scores(told, 0.0, job.model_config)["exact_match"] == 100


def test_labels_of_words_and_choices_follow_padding_in_front(text: str, tmp_path: Path) -> None:
    given = {"tokenizer_name": padding_in_front(tmp_path / "left", text)}
    words = ["self", "import", "argument", "a", "value"]
    rows = [{"tokens": words[: 1 + i], "tags": words[: 1 + i]} for i in range(5)]
    job = described(tmp_path, rows, "token-classification", **given).job
    batch = job.first_batch(job.train, 5)
    names = label_names(job.model_config)
    assert bool((batch["attention_mask"][0, :3] == 0).all())
    for ids, labels, row in zip(batch["input_ids"], batch["labels"], rows, strict=True):
        first_tokens = [job.tokenizer(f" {word}")["input_ids"][1] for word in row["tokens"]]
        places = torch.nonzero(labels >= 0)[:, 0]
        assert ids[places].tolist() == first_tokens
        assert [names[int(n)] for n in labels[places]] == row["tags"]
    choices = [{"question": "q", "choices": ["a b c d e f g h i j", "k"], "label": i % 2}
               for i in range(4)]  # fmt: skip
    job = described(tmp_path, choices, "multiple-choice", **given).job
    batch = job.first_batch(job.train, 2)
    want = job.tokenizer("q", "k")["input_ids"]
    assert batch["input_ids"][0, 1, -len(want) :].tolist() == want
    mask = batch["attention_mask"][0, 1]
    assert mask[-len(want) :].all() and int(mask.sum()) == len(want) < len(mask)


def gpt2_folder(folder: Path, text: str, **config: Any) -> Any:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    tokenizer: Any = train_tokenizer([text], 320, 64)
    tokenizer.save_pretrained(folder)
    given = {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "num_labels": 2}
    torch.manual_seed(0)
    made = GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **given, **config)
    GPT2ForSequenceClassification(made).save_pretrained(folder)
    return tokenizer


TEXTS: Rows = [{"text": "def f(x):" * (1 + i), "label": "ab"[i % 2]} for i in range(4)]


def test_a_decoder_pools_the_last_token_where_its_configuration_pads_by_another(
    text: str, tmp_path: Path
) -> None:
    """The logits of a padded row are those of the row alone."""
    folder = tmp_path / "model"
    gpt2_folder(folder, text, pad_token_id=5)
    run = described(tmp_path, TEXTS, "text-classification", model_name_or_path=str(folder))
    job = run.job
    model = build_model(job.config, job.model_config).eval()
    batch = job.first_batch(job.train, 4)
    del batch["labels"]
    with torch.no_grad():
        together = model(**batch).logits
        for n, mask in enumerate(batch["attention_mask"]):
            alone = model(input_ids=batch["input_ids"][n, mask == 1][None]).logits[0]
            torch.testing.assert_close(together[n], alone, rtol=1e-4, atol=1e-5)
    assert job.model_config.pad_token_id == job.tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("text-classification", TEXTS),
        ("token-classification", [{"tokens": ["a"], "tags": [t]} for t in "xy"]),
        ("multiple-choice", [{"question": "q", "choices": ["a", "b"], "label": 0}] * 2),
        ("question-answering", questions()),
    ],
)
def test_a_padding_token_that_the_model_lacks_is_refused(
    task: str, rows: Rows, text: str, tmp_path: Path
) -> None:
    folder = bert_folder(tmp_path / "model", text)
    tokenizer = bert_tokenizer(text)
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    tokenizer.save_pretrained(tmp_path / "padded")
    with pytest.raises(InputError, match=r"the padding token '<new>' has the id 400, over the "):
        described(
            tmp_path, rows, task, model_name_or_path=str(folder),
            tokenizer_name=str(tmp_path / "padded"),
        )  # fmt: skip


def test_positions_that_count_from_padding_stay(text: str, tmp_path: Path) -> None:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    tokenizer = trained_tokenizer([text], 400, 64, "roberta")
    tokenizer.save_pretrained(tmp_path / "model")
    config = RobertaConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=80, pad_token_id=7,
    )  # fmt: skip
    RobertaForSequenceClassification(config).save_pretrained(tmp_path / "model")
    given = {"model_name_or_path": str(tmp_path / "model")}
    job = described(tmp_path, TEXTS, "text-classification", **given).job
    assert tokenizer.pad_token_id != 7 == job.model_config.pad_token_id


# ---- labels

TWELVE = {n: f"name{(5 * n) % 12}" for n in range(12)}


def with_labels(folder: Path, labels: dict[str, str]) -> Path:
    """The folder with these labels in its config.json, in their order there."""
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = labels
    config["label2id"] = {name: int(number) for number, name in labels.items()}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_labels_keep_their_numbers_in_a_file_of_another_order(
    task: str, text: str, tmp_path: Path
) -> None:
    folder = bert_folder(tmp_path / "model", text, id2label=TWELVE)
    with_labels(folder, {n: TWELVE[int(n)] for n in sorted(map(str, TWELVE))})
    rows: Rows = [{"text": "abc", "label": name} for name in TWELVE.values()]
    if task == "token-classification":
        rows = [{"tokens": ["abc"], "tags": [name]} for name in TWELVE.values()]
    job = described(tmp_path, rows, task, model_name_or_path=str(folder)).job
    assert label_names(job.model_config) == TWELVE
    told = [row["labels"] for row in job.train]
    if task == "token-classification":
        told = [label for row in told for label in row if label >= 0]
    assert told == list(range(12))


@pytest.mark.parametrize("labels", [{"1": "a", "2": "b"}, {"0": "a", "1": "b", "2": "b"}])
def test_labels_without_a_number_each_are_refused(
    labels: dict[str, str], text: str, tmp_path: Path
) -> None:
    folder = bert_folder(tmp_path / "model", text, num_labels=len(labels))
    with_labels(folder, labels)
    with pytest.raises(InputError, match=r"labels are not 0 to \d with a name each \(\d: a, "):
        described(tmp_path, TEXTS, "text-classification", model_name_or_path=str(folder))


THREE: Rows = [{"text": "abc", "label": "xyz"[i % 3]} for i in range(6)]


def test_a_head_of_another_size_is_refused_or_starts_at_random(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    folder = bert_folder(tmp_path / "model", text)
    given: dict[str, Any] = {"model_name_or_path": str(folder)}
    job = described(tmp_path, THREE, "text-classification", **given).job
    with pytest.raises(InputError, match=r"has a head for 2 labels, and the data have 3 .*; fix: "
                       r".* --ignore_mismatched_sizes"):  # fmt: skip
        build_model(job.config, job.model_config)
    given["ignore_mismatched_sizes"] = True
    job = described(tmp_path, THREE, "text-classification", **given).job
    model = build_model(job.config, job.model_config)
    said = capsys.readouterr().err
    assert "note: 2 weights of the head have other shapes in the model folder" in said
    head: Any = model.classifier
    assert head.weight.shape == (3, 32) and 0 < float(head.weight.detach().std()) < 0.1
    again: Any = build_model(job.config, job.model_config)
    assert torch.equal(again.classifier.weight, head.weight), "drawn by the seed"
    stored = load_file(folder / "model.safetensors")
    for name, value in model.named_parameters():
        assert name.startswith("classifier") or torch.equal(value, stored[name])


def test_weights_below_the_head_have_their_shapes(text: str, tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "model", text)
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    job = described(
        tmp_path, TEXTS, "text-classification", model_name_or_path=str(folder),
        ignore_mismatched_sizes=True,
    ).job  # fmt: skip
    with pytest.raises(InputError, match=r"is \[48\] in the file and \[64\] by config\.json"):
        build_model(job.config, job.model_config)


@pytest.mark.parametrize("odd", ["N/A", "nan", "inf"])
@pytest.mark.parametrize("labels", [[0.5, 2.5, 4.5, 1.5, 3.5], [4, 1.0, "2", 3.5, 5]])
def test_one_label_that_is_no_number_is_no_class(
    odd: str, labels: list[Any], tmp_path: Path
) -> None:
    rows = [{"text": "abc", "label": label} for label in labels]
    bad = [*rows[:3], {"text": "abc", "label": odd}, *rows[3:]]
    with pytest.raises(InputError, match=rf"the label '{odd}' is no finite .*jsonl, line 4; fix"):
        described(tmp_path, bad, "text-classification")
    run = described(tmp_path, rows, "text-classification")
    assert run.job.model_config.problem_type == "regression"
    assert "data       regression: a label is a number" in summary(run).splitlines()


def test_numbers_among_names_are_names(tmp_path: Path) -> None:
    rows = [{"text": "abc", "label": label} for label in ("3.11", "pypy", "jython", "3.12")]
    run = described(tmp_path, rows, "text-classification")
    assert run.facts[1] == "4 labels: 3.11, 3.12, jython, pypy"


# ---- columns

COLUMNS: dict[str, tuple[dict[str, Any], str | None, tuple[str, ...], str]] = {
    "QNLI": ({"question": "a", "sentence": "b", "idx": 1}, None, ("question", "sentence"), "idx"),
    "QNLI, turned": ({"sentence": "b", "question": "a"}, None, ("question", "sentence"), ""),
    "RTE": ({"sentence1": "a", "sentence2": "b"}, None, ("sentence1", "sentence2"), ""),
    "MNLI": (
        {"premise": "a", "hypothesis": "b", "genre": "c"}, None, ("premise", "hypothesis"), "genre",
    ),
    "QQP": ({"question1": "a", "question2": "b"}, None, ("question1", "question2"), ""),
    "CoLA": ({"sentence": "a", "idx": "7"}, None, ("sentence",), "idx"),
    "BoolQ": ({"question": "a", "passage": "b"}, None, ("question", "passage"), ""),
    "a query": ({"query": "a", "document": "b"}, None, ("query", "document"), ""),
    "a text with others": ({"id": "x1", "text": "a"}, None, ("text",), "id"),
    "one text of any name": ({"n": 3, "review": "a"}, None, ("review",), "n"),
    "a number as text": ({"text": 3}, None, ("text",), ""),
    "named": ({"text": "a", "body": "b"}, "body", ("body",), "text"),
    "a pair, named": ({"text": "a", "body": "b", "c": 1}, "body,text", ("body", "text"), "c"),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_texts_are_read_from_the_columns_of_glue(name: str, tmp_path: Path) -> None:
    row, given, want, unused = COLUMNS[name]
    rows = [{**row, "label": "xy"[i % 2]} for i in range(4)]
    run = described(tmp_path, rows, "text-classification", text_column=given)
    texts = [str(row[column]) for column in want]
    assert run.job.train[0]["input_ids"] == run.job.tokenizer(*texts)["input_ids"]
    [line] = [one for one in summary(run).splitlines() if one.startswith("data       reads ")]
    assert ", ".join(want) in line and "label" in line
    assert line.endswith(f"; not used: {unused}") if unused else "not used" not in line


@pytest.mark.parametrize(
    ("row", "given", "told"),
    [
        ({"a": "x", "b": "y", "c": "z"}, "a,b,c", "3 columns of text (a, b, c), in --text_column"),
        ({"title": "x", "review": "y"}, None, "several columns have texts (title, review), in "),
        ({"question": "x", "text": "y"}, None, "several columns have texts (question, text)"),
        (
            {"question": "x", "sentence": "y", "context": "z"}, None,
            "several columns have texts (question, sentence, context)",
        ),
        ({"n": 1}, None, "there is no column 'text' or 'sentence' (but 'n', 'label')"),
    ],
)  # fmt: skip
def test_columns_that_are_not_plain_are_asked_for(
    row: dict[str, Any], given: str | None, told: str, tmp_path: Path
) -> None:
    rows = [{**row, "label": "xy"[i % 2]} for i in range(4)]
    with pytest.raises(InputError) as caught:
        described(tmp_path, rows, "text-classification", text_column=given)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_both_tables_have_the_columns(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "a", "label": "x"}\n')
    rows = [{"question": "q", "sentence": "s", "label": "xy"[i % 2]} for i in range(4)]
    with pytest.raises(InputError, match=r"no column 'question' .*other\.jsonl"):
        described(tmp_path, rows, "text-classification", validation_file=str(other))


SWAG = {
    "sent1": "He opens the door.", "sent2": "He", "ending0": "goes in.", "ending1": "eats it.",
    "ending2": "sings.", "ending3": "closes it.", "label": 0,
}  # fmt: skip


def test_choices_of_swag_begin_with_its_second_sentence(tmp_path: Path) -> None:
    """The first sentence with the second and an ending, as transformers' example has it."""
    run = described(tmp_path, [SWAG, {**SWAG, "label": 3}], "multiple-choice")
    for c in range(4):
        want = run.job.tokenizer(SWAG["sent1"], f"{SWAG['sent2']} {SWAG[f'ending{c}']}")
        assert run.job.train[0][f"input_ids.{c}"] == want["input_ids"]
    assert "each of 4 choices is sent2 with an ending" in summary(run)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ending3": None}, "column 'ending3' has nothing, in {}, line 2"),
        ({"ending3": ""}, "column 'ending3' is empty, in {}, line 2"),
        ({"ending5": "x"}, "there is a column 'ending5', but not all before it, in {}, line 2"),
        ({"sent2": None}, "column 'sent2' has nothing, in {}, line 2"),
    ],
)
def test_endings_that_are_missing_are_refused(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        described(tmp_path, [SWAG, {**SWAG, **change}], "multiple-choice")
    assert told.format(tmp_path / "train.jsonl") in str(caught.value)


# ---- words


def byte_level(folder: Path, text: str, kind: str) -> Any:
    """A byte-level tokenizer of one of transformers' classes, saved."""
    from tokenizers import Regex, pre_tokenizers

    found: Any = trained_tokenizer([text], 500, 64, "roberta")
    if kind == "after a split":
        found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    found.save_pretrained(folder)
    if kind.endswith("Tokenizer"):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps({**config, "tokenizer_class": kind})
        )
    return found


@pytest.mark.parametrize(
    "kind", ["RobertaTokenizer", "GPT2Tokenizer", "DebertaTokenizer", "plain", "after a split"]
)
def test_words_have_the_tokens_of_a_running_text(kind: str, text: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    plain = byte_level(tmp_path / "tokenizer", text, kind)
    words = ["self", "argument.x", "'option'", "return", "(x)"]
    rows = [{"tokens": words, "tags": ["a", "b", "a", "b", "a"]}] * 2
    given = {"tokenizer_name": str(tmp_path / "tokenizer")}
    job = described(tmp_path, rows, "token-classification", **given).job
    if kind.endswith("Tokenizer"):
        assert type(job.tokenizer).__name__.startswith(kind)
    want = [
        token for word in words for token in plain(f" {word}", add_special_tokens=False).input_ids
    ]
    special = set(job.tokenizer.all_special_ids)
    assert [n for n in job.train[0]["input_ids"] if n not in special] == want
    assert sum(label >= 0 for label in job.train[0]["labels"]) == len(words)
    assert plain("self", add_special_tokens=False).input_ids != want[:1]
    # what is saved does the same
    job.processor.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    again = loaded(words, is_split_into_words=True)
    assert again["input_ids"] == job.train[0]["input_ids"]


def test_tokenizers_without_bytes_stay(text: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from onward.recipes.tasks.word_spaces import put_spaces_before_words

    backend = Tokenizer(models.WordLevel({"self": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    before = tokenizer.backend_tokenizer.to_str()
    put_spaces_before_words(tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_a_tokenizer_that_cannot_put_spaces_says_so(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A class that splits first, and makes its parts anew when it is loaded."""
    plain = byte_level(tmp_path / "tokenizer", text, "Qwen2Tokenizer")
    rows = [{"tokens": ["self", "return"], "tags": ["a", "b"]}] * 2
    given = {"tokenizer_name": str(tmp_path / "tokenizer")}
    job = described(tmp_path, rows, "token-classification", **given).job
    assert "puts no space before the words of a list" in capsys.readouterr().err
    want = [
        n for word in ("self", "return") for n in plain(word, add_special_tokens=False).input_ids
    ]
    assert [n for n in job.train[0]["input_ids"] if n not in job.tokenizer.all_special_ids] == want
