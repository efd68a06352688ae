"""TwinBERT (Lu et al., 2020, arXiv 2002.06275): two towers, pooled by learned weights, crossed by a
residual layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

LARGE = {"layers": 4, "hidden": 384, "heads": 12, "vocab_size": 8000, "length": 64}
TINY = {"layers": 1, "hidden": 32, "heads": 2, "vocab_size": 100, "length": 8}


class TwinBert(nn.Module):
    """Scores a query beside a keyword: the logit is that they belong together."""

    def __init__(self, size: Mapping[str, int]) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        hidden = size["hidden"]
        config = BertConfig(
            vocab_size=size["vocab_size"], num_hidden_layers=size["layers"], hidden_size=hidden,
            num_attention_heads=size["heads"], intermediate_size=4 * hidden,
            max_position_embeddings=max(64, size["length"]), hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.query = BertModel(config, add_pooling_layer=False)
        self.keyword = BertModel(config, add_pooling_layer=False)
        self.weight = nn.Linear(hidden, 1)
        self.residual = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1)

    def pooled(self, tower: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        """The mean f32[B,D] of the states, by a softmax over a score of each real token."""
        states = tower(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, T, D]
        lowest = torch.finfo(states.dtype).min
        scores = self.weight(states).squeeze(-1).masked_fill(mask == 0, lowest)  # [B, T]
        return (scores.softmax(-1).unsqueeze(-1) * states).sum(1)

    def forward(
        self, query_ids: Tensor, query_mask: Tensor, keyword_ids: Tensor, keyword_mask: Tensor,
        labels: Tensor,
    ) -> Tensor:  # fmt: skip
        """The mean binary cross-entropy of the labels f32[B]."""
        query = self.pooled(self.query, query_ids, query_mask)
        keyword = self.pooled(self.keyword, keyword_ids, keyword_mask)
        crossed = torch.maximum(query, keyword)
        crossed = crossed + nn.functional.relu(self.residual(crossed))
        logits = self.score(crossed).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def twin_bert(size: Mapping[str, int]) -> nn.Module:
    """The model with random weights, the same on every rank."""
    torch.manual_seed(0)
    return TwinBert(size).train()


def twin_batch(
    size: Mapping[str, int], rows: int, length: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Pairs of random tokens; a third of each sequence is padding on average."""
    found: dict[str, Tensor] = {}
    for side in ("query", "keyword"):
        ids = torch.randint(size["vocab_size"], (rows, length), generator=generator)
        real = torch.randint(length // 3, length + 1, (rows, 1), generator=generator)
        found[f"{side}_ids"] = ids
        found[f"{side}_mask"] = (torch.arange(length) < real).long()
    found["labels"] = torch.randint(2, (rows,), generator=generator).float()
    return found


__all__ = ["LARGE", "TINY", "TwinBert", "twin_batch", "twin_bert"]
