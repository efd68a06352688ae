"""Case -> model and batches, by the table of workloads."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from suite.batches import (
    Batch,
    causal_batch,
    masked_batch,
    next_word_batch,
    padded_masked_batch,
    padded_pair_batch,
    pair_batch,
)
from suite.cases import Case
from suite.family_models import FAMILY_MODELS
from suite.models import (
    ContrastiveTower,
    JoinedTower,
    TutorialTransformer,
    TwoTower,
    WeightedTower,
    bert_large,
    bert_small,
    bert_vocabulary,
    gpt2_medium,
    gpt2_small,
    gpt2_vocabulary,
    tutorial_vocabulary,
)
from suite.text import token_ids
from suite.workload import Workload

MODELS: dict[str, Workload] = {
    "gpt2_small": Workload(
        gpt2_small, gpt2_vocabulary, causal_batch, "GPT-2, 4 layers, 512 wide, 8 heads, V=50257"
    ),
    "gpt2_medium": Workload(
        gpt2_medium, gpt2_vocabulary, causal_batch, "GPT-2 medium, 24 layers, 1024 wide, V=50257"
    ),
    "bert_large": Workload(
        bert_large, bert_vocabulary, masked_batch, "BERT-large MLM, 15 % labelled, no padding"
    ),
    "bert_large_padded": Workload(
        bert_large, bert_vocabulary, padded_masked_batch, "BERT-large MLM, padded"
    ),
    "tutorial": Workload(
        TutorialTransformer,
        tutorial_vocabulary,
        next_word_batch,
        "nn.Transformer tutorial, 2 layers, 200 wide, V=28785",
    ),
    "two_tower": Workload(
        TwoTower,
        bert_vocabulary,
        pair_batch,
        "two BERT towers, 3 layers, 384 wide, queries a quarter as long, 25 % padding",
    ),
    "bert_padded": Workload(
        bert_small,
        bert_vocabulary,
        padded_masked_batch,
        "BERT MLM, 4 layers, 512 wide, 8 heads, V=30522",
    ),
    "two_tower_padded": Workload(
        TwoTower,
        bert_vocabulary,
        padded_pair_batch,
        "two BERT towers, 3 layers, 384 wide, queries a quarter as long",
    ),
    "two_tower_weighted": Workload(
        WeightedTower,
        bert_vocabulary,
        padded_pair_batch,
        "two BERT towers, 3 layers, 384 wide, pooled by a masked softmax's weights @ states",
    ),
    "two_tower_joined": Workload(
        JoinedTower,
        bert_vocabulary,
        padded_pair_batch,
        "two BERT towers, 3 layers, 384 wide, the first token and the mean side by side",
    ),
    "two_tower_contrastive": Workload(
        ContrastiveTower,
        bert_vocabulary,
        padded_pair_batch,
        "two BERT towers, 3 layers, 384 wide, means, compared both ways",
    ),
    **FAMILY_MODELS,
}


def make_model(case: Case, seed: int = 0) -> nn.Module:
    """A model in training mode; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return MODELS[case.model].build(case).train()


def make_batches(case: Case, count: int) -> list[Batch]:
    """`count` distinct batches on the CPU, the same ones for every engine."""
    workload = MODELS[case.model]
    per_batch = case.tokens_per_step + case.batch  # one token more per sequence, for next words
    ids = token_ids(workload.vocabulary(case), count * per_batch)
    generator = torch.Generator().manual_seed(1234)
    chunks = ids.reshape(count, per_batch)
    batches = [workload.batch(case, chunk, generator) for chunk in chunks]
    firsts = {next(iter(batch.values())).numpy().tobytes() for batch in batches}
    if len(firsts) != count:
        raise AssertionError("two batches are equal: a step could be served from a cache")
    return batches


def described(case: Case) -> dict[str, Any]:
    """The case as it stands in a report."""
    return asdict(case) | {"about": MODELS[case.model].about}
