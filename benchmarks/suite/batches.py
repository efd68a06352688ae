"""Token ids -> batches, one function for each kind of training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from suite.cases import Case

Batch = dict[str, Tensor]
IGNORED_LABEL = -100  # what cross_entropy and every Hugging Face loss skip


def shares(batches: Iterable[Batch]) -> dict[str, list[float]]:
    """Per batch: the share of real tokens and, where there are labels, of real ones with one."""
    found: dict[str, list[float]] = {"real": []}
    for batch in batches:
        masks = [value for name, value in batch.items() if name.endswith("mask")]
        real = sum(int(mask.sum()) for mask in masks)
        found["real"].append(real / sum(mask.numel() for mask in masks))
        if "labels" in batch:
            labelled = int((batch["labels"] != IGNORED_LABEL).sum())
            found.setdefault("labelled", []).append(labelled / real)
    return found


def causal_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    """Every token is the label of the one before it; the model shifts them."""
    del generator
    tokens = ids[: case.batch * case.tokens].reshape(case.batch, case.tokens)
    return {"input_ids": tokens, "labels": tokens.clone()}


def next_word_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    """Sequences lie along the columns; targets are the words one place on."""
    del generator
    columns = ids.reshape(case.batch, case.tokens + 1)
    return {"source": columns[:, :-1].t().contiguous(), "target": columns[:, 1:].t().contiguous()}


def masked_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    """All positions real, 15 % of them labelled; those read the mask id (no 80/10/10 split)."""
    tokens = ids[: case.batch * case.tokens].reshape(case.batch, case.tokens)
    chosen = torch.rand(tokens.shape, generator=generator) < 0.15
    return {
        "input_ids": tokens.masked_fill(chosen, 3),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~chosen, IGNORED_LABEL),
    }


def pair_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    """Queries a quarter as long as passages; lengths uniform from half to full, then padding."""
    batch: Batch = {}
    start = 0
    for name, length in (("query", case.tokens // 4), ("passage", case.tokens)):
        tokens = ids[start : start + case.batch * length].reshape(case.batch, length)
        start += case.batch * length
        real = torch.randint(length // 2, length + 1, (case.batch, 1), generator=generator)
        mask = torch.arange(length) < real
        batch[f"{name}_ids"] = tokens * mask
        batch[f"{name}_mask"] = mask.long()
    return batch


def _lengths(case: Case, most: int, generator: torch.Generator) -> Tensor:
    """`i64[B]`, 1 to `most`: normal around the share of real tokens, clipped two sigmas away.

    The mean of each batch is moved half the way to the share, so that totals vary, but by little.
    """
    sigma = 0.5 * most * min(case.real, 1.0 - case.real)
    drawn = torch.randn(case.batch, generator=generator)
    drawn = case.real * most + sigma * (drawn - 0.5 * drawn.mean())
    return drawn.round().long().clamp(1, most)


def padded_masked_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    """Some tokens real, some of those labelled; 15 % of the real ones read the mask id."""
    tokens = ids[: case.batch * case.tokens].reshape(case.batch, case.tokens)
    lengths = _lengths(case, case.tokens, generator)
    mask = torch.arange(case.tokens) < lengths.unsqueeze(1)
    drawn = torch.rand(tokens.shape, generator=generator)
    chosen = mask & (drawn < case.labelled)
    chosen[0, 0] |= not chosen.any()  # the mean over no labels is NaN
    masked = chosen & (drawn < 0.15)
    batch = {
        "input_ids": tokens.masked_fill(masked, 3) * mask,
        "attention_mask": mask.long(),
        "labels": tokens.masked_fill(~chosen, IGNORED_LABEL),
    }
    most = int(lengths.max()) if case.fit else case.tokens
    return {name: value[:, :most].contiguous() for name, value in batch.items()}


def padded_pair_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    """Queries a quarter as long as passages, each with its own length, then padding."""
    batch: Batch = {}
    start = 0
    for name, most in (("query", case.tokens // 4), ("passage", case.tokens)):
        tokens = ids[start : start + case.batch * most].reshape(case.batch, most)
        start += case.batch * most
        mask = torch.arange(most) < _lengths(case, most, generator).unsqueeze(1)
        batch[f"{name}_ids"] = tokens * mask
        batch[f"{name}_mask"] = mask.long()
    return batch
