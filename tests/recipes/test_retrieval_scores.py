"""Scores of a search without labels, by tiles and with ties; and hard negatives."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from tower_runs import PAIRS, WORDS, described

from onward.recipes.loop import train
from onward.recipes.start_model import build_model
from onward.recipes.tasks import text_retrieval
from onward.recipes.tasks.text_retrieval import ranking_scores


def unit_vectors(count: int, width: int = 8, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((count, width))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("more", [0, 40])
def test_scores_by_tiles_are_those_of_all_pairs_at_once(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, documents = unit_vectors(50), unit_vectors(50 + more, seed=1)
    cosines = query @ documents.T
    nearer = (cosines > np.diag(cosines)[:, None]).sum(1)
    want = {f"recall_at_{k}": (nearer < k).mean() for k in (1, 10)}
    want["auc"] = roc_auc_score(np.eye(50, 50 + more).ravel(), cosines.ravel())
    for tile in (7, 50, 4096):
        monkeypatch.setattr(text_retrieval, "_TILE", tile)
        found = ranking_scores(query, documents, np.arange(50 + more))
        assert found == pytest.approx(want, rel=1e-12)


def test_scores_of_many_pairs_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_retrieval, "_TILE", 64)
    query, documents = unit_vectors(1500, 2), unit_vectors(1500, 2, seed=1)
    tracemalloc.start()
    ranking_scores(query, documents, np.arange(1500))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1500 * 1500 * 4 / 8, "all cosines in f32 take 9 MB"


def test_an_encoder_with_one_vector_for_all_finds_no_more_than_chance() -> None:
    query = np.tile(unit_vectors(1), (40, 1))
    found = ranking_scores(query, query, np.arange(40))
    assert found == pytest.approx({"recall_at_1": 1 / 40, "recall_at_10": 10 / 40, "auc": 0.5})
    found = ranking_scores(query * np.nan, query, np.arange(40))
    assert found == {"recall_at_1": 0.0, "recall_at_10": 0.0, "auc": 0.0}


def test_ties_are_the_mean_of_all_orders() -> None:
    """Cosines of few levels, against ranks that are drawn."""
    drawn = np.random.default_rng(0)
    query = np.eye(3, dtype=np.float32)[drawn.integers(0, 3, 30)]
    documents = np.eye(3, dtype=np.float32)[drawn.integers(0, 3, 30)]
    found = ranking_scores(query, documents, np.arange(30))
    cosines = query @ documents.T
    hits = np.zeros(2)
    for _ in range(2000):
        jittered = cosines + 1e-3 * drawn.random(cosines.shape)
        ranks = (jittered > np.diag(jittered)[:, None]).sum(1)
        hits += (ranks < 1).mean(), (ranks < 10).mean()
    assert [found["recall_at_1"], found["recall_at_10"]] == pytest.approx(hits / 2000, abs=0.01)
    assert found["auc"] == pytest.approx(roc_auc_score(np.eye(30).ravel(), cosines.ravel()))


def test_a_document_with_the_own_text_counts_as_found(tmp_path: Path) -> None:
    rows = [{"query": f"what is {word}", "document": "a number"} for word in WORDS]
    rows[0]["document"] = "the first of all"
    job = described(tmp_path, rows).job
    held = list(job.eval)
    vectors = torch.from_numpy(unit_vectors(len(held)))
    outputs = {"query_embeds": vectors, "document_embeds": vectors[[0, *[1] * (len(held) - 1)]]}
    found = job.task.scores(job.task.predictions(held, {}, outputs), 0.0, job.model_config)
    cosines = (outputs["query_embeds"] @ outputs["document_embeds"].T).numpy()
    right = [cosines[0, 0] > cosines[0, 1], *(row[1] > row[0] for row in cosines[1:])]
    assert found["recall_at_1"] == pytest.approx(np.mean(right)) and 0 < np.mean(right) < 1


def with_negatives(count: int = 2) -> list[dict[str, Any]]:
    names = ["negative", "negative_1", "negative_2"][:count]
    return [
        {"anchor": row["query"], "positive": row["document"],
         **{name: f"{WORDS[(i + n + 3) % 11]} is no number" for n, name in enumerate(names)}}
        for i, row in enumerate(PAIRS)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_negatives_are_documents_of_the_batch(count: int, tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    rows = with_negatives(count)
    job = described(tmp_path, rows).job
    batch = job.first_batch(job.train, 5)
    model: Any = build_model(job.config, job.model_config).eval()
    found = model(**batch)
    texts = [[row[name] for row in rows[:5]] for name in rows[0]]
    tokenizer: Any = job.tokenizer
    vectors = []
    for side, column in zip("qd" + "d" * count, texts, strict=True):
        tokens = tokenizer(column, padding=True, return_tensors="pt")
        tower = model.query if side == "q" else model.document
        vectors.append(tower(tokens["input_ids"], tokens["attention_mask"]))
    loss: Any = MultipleNegativesRankingLoss(None)  # type: ignore[arg-type]
    want = loss.compute_loss_from_embeddings(vectors, None)
    torch.testing.assert_close(found.loss, want, rtol=1e-5, atol=1e-6)
    found = {
        engine: train(job, engine, tmp_path, save_model=False) for engine in ("onward", "torch")
    }
    ours, eager = found["onward"], found["torch"]
    np.testing.assert_allclose(ours.step_losses, eager.step_losses, rtol=2e-5)
    assert ours.eval_loss == pytest.approx(eager.eval_loss, rel=2e-5)
    assert ours.scores == pytest.approx(eager.scores, rel=1e-5)
    pairs = described(tmp_path, [{n: row[n] for n in ("anchor", "positive")} for row in rows])
    plain = train(pairs.job, "torch", tmp_path, save_model=False)
    assert plain.step_losses[0] < eager.step_losses[0], "fewer documents to tell apart"
    assert pairs.train_tokens < described(tmp_path, rows).train_tokens


def test_a_residual_crossing_learns_that_negatives_are_wrong(tmp_path: Path) -> None:
    rows = with_negatives()
    table = described(tmp_path, rows, crossing="residual").sources[0]
    assert [(row["positive"], row["label"]) for row in table.rows] == [  # type: ignore[union-attr]
        pair
        for row in rows
        for pair in ((row["positive"], 1), (row["negative"], 0), (row["negative_1"], 0))
    ]
