"""Two towers: losses by hand, scores of the usual packages, files that others read, and search."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from tower_runs import NARROW, PAIRS, config, described, words

from onward.cli import main
from onward.recipes.describe import describe
from onward.recipes.loop import train
from onward.recipes.options import InputError
from onward.recipes.search import embed, load_towers, nearest, read_index
from onward.recipes.start_model import build_model
from onward.recipes.tasks.text_retrieval import TEACHER, area_under_roc
from onward.recipes.tower_settings import keep_settings, read_settings

KINDS = list(
    itertools.product(
        ("shared", "separate"), ("mean", "cls", "weighted"), ("cosine", "residual"), (False, True)
    )
)


@pytest.mark.parametrize(("towers", "pooling", "crossing", "has_label"), KINDS)
def test_each_kind_trains_as_eager_pytorch(
    towers: str, pooling: str, crossing: str, has_label: bool, tmp_path: Path
) -> None:
    rows = [{**row, "label": i % 3 / 2} for i, row in enumerate(PAIRS)] if has_label else None
    job = described(tmp_path, rows, towers=towers, pooling=pooling, crossing=crossing).job
    found = {
        engine: train(job, engine, tmp_path, save_model=False) for engine in ("onward", "torch")
    }
    ours, eager = found["onward"], found["torch"]
    np.testing.assert_allclose(ours.step_losses, eager.step_losses, rtol=2e-5)
    assert ours.eval_loss == pytest.approx(eager.eval_loss, rel=2e-5)
    assert ours.scores.keys() == eager.scores.keys()
    labelled = has_label or crossing == "residual"  # which draws wrong pairs
    assert set(ours.scores) == ({"auc"} if labelled else {"auc", "recall_at_1", "recall_at_10"})
    assert len(job.train) == len(PAIRS) * (2 if crossing == "residual" and not has_label else 1)
    model = build_model(job.config, job.model_config)
    assert (
        sum(p.numel() for p in model.parameters())
        == described(tmp_path, rows, towers=towers, pooling=pooling, crossing=crossing).parameters
    )


def by_hand(job: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The unit vectors of both sides, by transformers' own encoder and a plain mean."""
    from transformers import AutoModel

    torch.manual_seed(job.config.seed)
    encoder = AutoModel.from_config(job.model_config).eval()
    vectors = []
    for side in ("query", "document"):
        ids, mask = batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
        states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        means = torch.stack(
            [row[real.bool()].mean(0) for row, real in zip(states, mask, strict=True)]
        )
        vectors.append(means / means.norm(dim=1, keepdim=True))
    return vectors[0], vectors[1]


def test_the_loss_is_the_softmax_over_the_documents_of_the_batch(tmp_path: Path) -> None:
    job = described(tmp_path).job
    batch = job.first_batch(job.train, 5)
    query, document = by_hand(job, batch)
    want = torch.stack(
        [
            -torch.log_softmax(20 * torch.stack([q @ d for d in document]), 0)[i]
            for i, q in enumerate(query)
        ]
    ).mean()
    model = build_model(job.config, job.model_config).eval()
    torch.testing.assert_close(model(**batch).loss, want, rtol=1e-5, atol=1e-6)


def test_labels_are_learnt_by_the_cross_entropy_of_the_cosine(tmp_path: Path) -> None:
    rows = [{**row, "score": i / 10} for i, row in enumerate(PAIRS)]
    job = described(tmp_path, rows).job
    batch = job.first_batch(job.train, 5)
    torch.testing.assert_close(batch["labels"], torch.arange(5) / 10)
    query, document = by_hand(job, batch)
    told = torch.sigmoid(10 * ((query * document).sum(1) - 0.5))
    true = batch["labels"]
    want = -(true * told.log() + (1 - true) * (1 - told).log()).mean()
    model = build_model(job.config, job.model_config).eval()
    torch.testing.assert_close(model(**batch).loss, want, rtol=1e-4, atol=1e-6)


def test_the_area_is_that_of_scikit_learn() -> None:
    drawn = np.random.default_rng(0)
    for size in (2, 3, 10, 101):
        for levels in (1, 2, 5, 1000):
            right = drawn.random(size) < 0.4
            right[:2] = True, False
            scores = drawn.integers(0, levels, size).astype(np.float64)
            assert area_under_roc(right, scores) == pytest.approx(roc_auc_score(right, scores))
    assert area_under_roc(np.ones(3, bool), np.arange(3.0)) == 0.5


def test_recall_counts_the_own_document_among_the_nearest(tmp_path: Path) -> None:
    job = described(tmp_path).job
    rows = list(job.eval)
    drawn = torch.nn.functional.normalize(
        torch.randn(2, len(rows), 8, generator=torch.Generator().manual_seed(1)), dim=-1
    )
    outputs = {"query_embeds": drawn[0], "document_embeds": drawn[1], "logits": drawn[0]}
    scores = job.task.scores(job.task.predictions(rows, {}, outputs), 0.0, job.model_config)
    order = (-(drawn[0] @ drawn[1].T)).argsort(1).tolist()
    for k in (1, 10):
        want = np.mean([i in near[:k] for i, near in enumerate(order)])
        assert scores[f"recall_at_{k}"] == pytest.approx(want)
    cosines = (drawn[0] @ drawn[1].T).numpy()
    assert scores["auc"] == pytest.approx(roc_auc_score(np.eye(len(rows)).ravel(), cosines.ravel()))


# ---- files


@pytest.mark.parametrize(
    "kind",
    [
        ("shared", "mean", "cosine"), ("separate", "cls", "cosine"),
        ("shared", "lasttoken", "cosine"),
        ("separate", "weighted", "residual"), ("shared", "weighted", "cosine"),
    ],
)  # fmt: skip
def test_what_is_written_is_read_by_others(kind: tuple[str, str, str], tmp_path: Path) -> None:
    """Vectors are alike by sentence-transformers, by onnxruntime and by a model that is loaded
    again; training goes on from the folder with the settings that it has."""
    import onnxruntime
    from sentence_transformers import SentenceTransformer

    towers, pooling, crossing = kind
    more = ("--towers", towers, "--pooling", pooling, "--crossing", crossing)
    assert main(words(tmp_path, *more)) == 0
    out = tmp_path / "out"
    trained = load_towers(out)
    settings = trained.settings
    assert settings == read_settings(trained.config)
    assert (settings.separate, settings.pooling, settings.crossing) == (
        towers == "separate", pooling, crossing,
    )  # fmt: skip
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    texts = [row["document"] for row in PAIRS]
    batch = tokenizer(texts, padding=True, return_tensors="np")
    for side in ("query", "document"):
        place = out / "document" if towers == "separate" and side == "document" else out
        want = embed(getattr(trained, side), tokenizer, texts).numpy()
        session = onnxruntime.InferenceSession(place / "model.onnx")
        named = {n: batch[n] for n in ("input_ids", "attention_mask")}
        told = np.asarray(session.run(None, named)[0])
        np.testing.assert_allclose(told, want, rtol=1e-4, atol=1e-5)
        is_known = crossing == "cosine" and pooling != "weighted"
        assert (place / "modules.json").is_file() == is_known
        if is_known:
            theirs = SentenceTransformer(str(place), device="cpu").encode(texts)
            np.testing.assert_allclose(theirs, want, rtol=1e-4, atol=1e-5)
    if settings.labelled:
        vectors = np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32)
        session = onnxruntime.InferenceSession(out / "crossing.onnx")
        pair = {"query_embeds": vectors[0], "document_embeds": vectors[1]}
        told = np.asarray(session.run(None, pair)[0])
        with torch.no_grad():
            want = trained.crossing(*map(torch.from_numpy, vectors)).numpy()
        np.testing.assert_allclose(told, want, rtol=1e-4, atol=1e-5)
    again = describe(
        config(tmp_path, model_name_or_path=str(out), vocab_size=None, config_overrides=None)
        if not settings.labelled
        else config(
            tmp_path, [{**row, "label": 1} for row in PAIRS], model_name_or_path=str(out),
            vocab_size=None, config_overrides=None,
        )
    ).job  # fmt: skip
    assert read_settings(again.model_config) == settings
    model = build_model(again.config, again.model_config)
    for (name, value), (other, same) in zip(
        trained.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(value, same), name


def test_towers_are_quantized_to_int8(tmp_path: Path) -> None:
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    assert main(words(tmp_path)) == 0
    small = tmp_path / "int8.onnx"
    quantize_dynamic(tmp_path / "out" / "model.onnx", small)
    drawn = np.random.default_rng(0).integers(0, 300, (5, 9))
    given = {"input_ids": drawn, "attention_mask": np.ones((5, 9), np.int64)}
    told = [
        np.asarray(onnxruntime.InferenceSession(path).run(None, given)[0])
        for path in (tmp_path / "out" / "model.onnx", small)
    ]
    assert (told[0] * told[1]).sum(1).min() > 0.98


def test_a_folder_of_sentence_transformers_gives_its_pooling(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    more = ("--pooling", "cls")
    assert main(words(tmp_path, *more)) == 0
    theirs = tmp_path / "theirs"
    SentenceTransformer(str(tmp_path / "out"), device="cpu").save(str(theirs))
    options = {"model_name_or_path": str(theirs), "vocab_size": None, "config_overrides": None}
    raw = json.loads((theirs / "config.json").read_text())
    raw.pop("two_towers", None)
    (theirs / "config.json").write_text(json.dumps(raw))
    settings = read_settings(describe(config(tmp_path, **options)).job.model_config)
    assert settings is not None and settings.pooling == "cls"
    settings = read_settings(describe(config(tmp_path, **options, pooling="mean")).job.model_config)
    assert settings is not None and settings.pooling == "mean"
    for path in (theirs / "1_Pooling" / "config.json",):
        path.write_text(json.dumps({"pooling_mode": "max"}))
    with pytest.raises(InputError, match="none of Onward's"):
        describe(config(tmp_path, **options))
    path.write_text("[")
    with pytest.raises(InputError, match="cannot be read"):
        describe(config(tmp_path, **options))


def test_overwriting_removes_the_document_tower(tmp_path: Path) -> None:
    assert main(words(tmp_path, "--towers", "separate")) == 0
    assert (tmp_path / "out" / "document" / "model.safetensors").is_file()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    assert main(words(tmp_path, "--overwrite_output_dir")) == 0
    assert not (tmp_path / "out" / "document").exists()
    assert (tmp_path / "out" / "mine.txt").read_text() == "kept"


# ---- search


def test_search_finds_the_nearest_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path)) == 0
    out = tmp_path / "out"
    towers = load_towers(out)
    vectors, texts = read_index(out, 32)
    assert texts == [row["document"] for row in PAIRS]
    capsys.readouterr()
    assert main(["search", str(out), "--query", "what is two", "--k", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    from transformers import AutoTokenizer

    [asked] = embed(towers.query, AutoTokenizer.from_pretrained(out), ["what is two"])
    cosines = (vectors @ asked).numpy()
    want = np.argsort(-cosines)[:3].tolist()
    assert [hit["number"] for hit in found["hits"]] == want
    assert [hit["text"] for hit in found["hits"]] == [texts[i] for i in want]
    np.testing.assert_allclose([h["score"] for h in found["hits"]], cosines[want], rtol=1e-5)
    hits = nearest(towers, AutoTokenizer.from_pretrained(out), "x", vectors, texts, 100)
    assert len(hits) == len(texts)  # no more than there are
    (out / "index.jsonl").write_text("{}\n")
    assert main(["search", str(out), "--query", "x"]) == 2
    assert "no index of documents" in capsys.readouterr().err


def test_search_scores_pairs_by_the_crossing(tmp_path: Path) -> None:
    assert main(words(tmp_path, "--crossing", "residual", "--pooling", "weighted")) == 0
    out = tmp_path / "out"
    towers = load_towers(out)
    vectors, texts = read_index(out, 32)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    hits = nearest(towers, tokenizer, "what is two", vectors, texts, 2)
    [asked] = embed(towers.query, tokenizer, ["what is two"])
    with torch.no_grad():
        each = [float(towers.crossing(asked[None], v[None])) for v in vectors]
    order = np.argsort(-np.array(each))[:2]
    assert [hit.number for hit in hits] == order.tolist()
    np.testing.assert_allclose([hit.score for hit in hits], np.array(each)[order], rtol=1e-5)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["search"], "no run is given"),
        (["search", "nowhere/at/all", "--query", "x"], "no such model folder"),
        (["search", "{out}", "--query", "x"], "has no towers"),
        (["search", "{out}", "--k", "0"], "k is 0"),
    ],
)
def test_a_search_that_cannot_be_is_refused(
    argv: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import BertConfig, BertModel

    small = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    BertModel(small).save_pretrained(tmp_path / "out")
    assert main([word.format(out=tmp_path / "out") for word in argv]) == 2
    assert told in capsys.readouterr().err


# ---- teachers, and bad input


def test_a_teacher_gives_its_scores(tmp_path: Path) -> None:
    """A cross-encoder's probability is what pairs are trained on; they are evaluated by labels."""
    rows = [{**row, "label": i % 2} for i, row in enumerate(PAIRS)]
    two = [{"sentence1": r["query"], "sentence2": r["document"], "label": r["label"]} for r in rows]
    file = tmp_path / "two.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in two))
    out = tmp_path / "teacher"
    assert main(["finetune", "--task", "text-classification", "--train_file", str(file),
                 "--validation_file", str(file), "--vocab_size", "320", "--config_overrides",
                 NARROW, "--max_steps", "2", "--per_device_train_batch_size", "4",
                 "--output_dir", str(out)]) == 0  # fmt: skip
    run = described(tmp_path, rows, teacher_model=str(out))
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    with torch.no_grad():
        want = [
            float(
                model(**tokenizer(r["query"], r["document"], return_tensors="pt"))
                .logits.softmax(-1)[0, 1]
            )
            for r in rows
        ]  # fmt: skip
    np.testing.assert_allclose([row["labels"] for row in run.job.train], want, rtol=1e-4)
    assert [row["_true"] for row in run.job.train] == [row["label"] for row in rows]
    unlabelled = described(tmp_path, teacher_model=str(out))
    assert len(unlabelled.job.train) == 2 * len(PAIRS) and TEACHER in unlabelled.sources[0].rows[0]  # type: ignore[union-attr]
    assert [row["_true"] for row in unlabelled.job.train][:4] == [1, 0, 1, 0]
    result = train(run.job, "onward", tmp_path, save_model=False)
    assert set(result.scores) == {"auc"}


def test_wrong_pairs_have_another_document(tmp_path: Path) -> None:
    run = described(tmp_path, crossing="residual")
    rows = run.sources[0].rows  # type: ignore[union-attr]
    for right, wrong, own in zip(rows[::2], rows[1::2], PAIRS, strict=True):
        assert right == {**own, "label": 1}
        assert wrong["query"] == own["query"] and wrong["label"] == 0
        assert wrong["document"] != own["document"]
    assert run.sources[0].where(2) == run.sources[0].where(3)  # type: ignore[union-attr]


BAD: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([{"query": "a", "document": "b", "label": 2}] * 8, {}, "label 2 is no number from 0 to 1"),
    ([{"query": "a", "document": "b", "label": None}] * 8, {}, "label None is no number"),
    ([{"query": "a", "document": "b", "label": "x"}] * 8, {}, "label 'x' is no number"),
    ([{"query": "a", "document": "b", "label": 10**400}] * 8, {}, "is no number from 0 to 1"),
    ([{"query": "a"}] * 8, {}, "there is no column 'document'"),
    ([{"query": "a", "document": "b"}] * 8, {"crossing": "residual"}, "pairs have one document"),
    ([{"query": "a", "document": "b"}] * 8, {"text_column": "query,c"}, "there is no column 'c'"),
    ([{"a": "a", "b": "b", "c": "c"}] * 8, {"text_column": "a,b,c"}, r"3 columns .*--text_column"),
    ([{"query": "a", "document": "b", "negative": "c", "label": 1}] * 8, {},
     "column 'negative' has negatives, and column 'label' labels"),
    ([{"query": "a", "document": "b", "hard_negatives": ["c"]}] * 8, {},
     r"column 'hard_negatives' has \['c'\]"),
    (PAIRS, {"model_name_or_path": "t5-tiny", "config_overrides": None}, "not a model for"),
    (PAIRS, {"mesh": "dp_replicate=2"}, "compares the samples of a batch"),
    (PAIRS, {"mesh": "tp=2"}, "no batches that tp can cut"),
    (PAIRS, {"lora_r": 4}, "has no adapters"),
    (PAIRS, {"teacher_model": "bert-tiny"}, "is a model from random weights"),
    (PAIRS, {"teacher_model": "nowhere/at/all"}, "in --teacher_model"),
    (PAIRS, {"model_name_or_path": "gpt2-tiny", "config_overrides": "n_embd=32,n_head=2",
             "max_seq_length": 5000}, "is over the model's"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "options", "told"), BAD, ids=[told for *_, told in BAD])
def test_bad_pairs_are_refused(
    rows: list[dict[str, Any]], options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=told):
        described(tmp_path, rows, **options)


@pytest.mark.parametrize("has_label", ["train", "held"])
def test_labels_of_one_file_alone_are_refused(has_label: str, tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    rows = {name: list[dict[str, Any]](map(dict, PAIRS)) for name in ("train", "held")}
    for row in rows[has_label]:
        row["label"] = 1
    held.write_text("".join(json.dumps(row) + "\n" for row in rows["held"]), encoding="utf-8")
    with pytest.raises(InputError, match="give both labels, or neither"):
        described(tmp_path, rows["train"], validation_file=str(held))


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gpt2-tiny", "n_embd=32,n_head=2,n_layer=1"),
        ("roberta-tiny", NARROW),
        ("llama-tiny", "hidden_size=32,intermediate_size=48,num_attention_heads=2,"
                       "num_key_value_heads=1,num_hidden_layers=1"),
    ],
)  # fmt: skip
def test_other_encoders_train_as_eager_pytorch(model: str, sizes: str, tmp_path: Path) -> None:
    """The last batch of an evaluation has one pair, whose loss is 0."""
    job = described(
        tmp_path, model_name_or_path=model, config_overrides=sizes, per_device_eval_batch_size=10
    ).job
    found = [train(job, engine, tmp_path, save_model=False) for engine in ("onward", "torch")]
    np.testing.assert_allclose(found[0].step_losses, found[1].step_losses, rtol=2e-5)
    assert found[0].eval_loss == pytest.approx(found[1].eval_loss, rel=2e-5)
    assert found[0].scores == pytest.approx(found[1].scores, rel=1e-5)


@pytest.mark.parametrize("odd", [1, {"pooling": "max"}, {"separate": 1}, {"x": 1}, {"pooling": []}])
def test_settings_that_cannot_be_are_refused(odd: Any, tmp_path: Path) -> None:
    job = described(tmp_path).job
    job.model_config.two_towers = odd
    with pytest.raises(InputError, match="no settings of towers"):
        read_settings(job.model_config)


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    assert main(words(tmp_path, "--pooling", "weighted")) == 0
    out = tmp_path / "out"
    for value in (torch.zeros(3), torch.zeros(1, 32, dtype=torch.int64)):
        save_file({"query.weight.weight": value}, out / "two_towers.safetensors")
        with pytest.raises(InputError, match=r"query\.weight\.weight in"):
            load_towers(out)
    (out / "two_towers.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(InputError, match="cannot be read"):
        load_towers(out)


def test_other_settings_keep_what_fits(tmp_path: Path) -> None:
    """A folder's towers are trained on with another pooling: the encoder is kept."""
    assert main(words(tmp_path)) == 0
    before = load_towers(tmp_path / "out")
    options = {"vocab_size": None, "config_overrides": None, "pooling": "weighted"}
    job = describe(config(tmp_path, model_name_or_path=str(tmp_path / "out"), **options)).job
    model: Any = build_model(job.config, job.model_config)
    weights = before.query.encoder.state_dict()
    assert all(torch.equal(v, weights[n]) for n, v in model.query.encoder.state_dict().items())
    keep_settings(job.model_config, dataclasses.replace(model.settings, separate=True))
    two: Any = build_model(job.config, job.model_config)
    assert two.document.encoder is not two.query.encoder


def test_a_folder_of_the_same_name_stays_beside_another_run(tmp_path: Path) -> None:
    """Starting afresh removes what the run has written, not a `document/` of its user's."""
    out = tmp_path / "out"
    other = ["finetune", "--corpus_bytes", "30000", "--vocab_size", "300", "--block_size", "16"]
    other += ["--max_steps", "1", "--max_eval_samples", "4", "--output_dir", str(out)]
    assert main(other) == 0
    for name in ("document/config.json", "1_Pooling/config.json"):
        (out / name).parent.mkdir()
        (out / name).write_text("mine")
    assert main([*other, "--overwrite_output_dir"]) == 0
    for name in ("document/config.json", "1_Pooling/config.json"):
        assert (out / name).read_text() == "mine"
