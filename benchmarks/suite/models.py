"""The models that are trained, with random weights; no weights or tokenizer are downloaded."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from suite.cases import Case


def _gpt2(case: Case, *, layers: int, width: int, heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny = case.size == "tiny"
    config = GPT2Config(
        n_layer=2 if tiny else layers,
        n_embd=64 if tiny else width,
        n_head=2 if tiny else heads,
        vocab_size=gpt2_vocabulary(case),
        n_positions=max(case.tokens, 64),
        resid_pdrop=case.dropout,
        embd_pdrop=case.dropout,
        attn_pdrop=case.dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def gpt2_vocabulary(case: Case) -> int:
    """GPT-2's words."""
    return 1000 if case.size == "tiny" else 50257


def gpt2_small(case: Case) -> nn.Module:
    """4 layers, 512 wide, 8 heads."""
    return _gpt2(case, layers=4, width=512, heads=8)


def gpt2_medium(case: Case) -> nn.Module:
    """24 layers, 1024 wide, 16 heads."""
    return _gpt2(case, layers=24, width=1024, heads=16)


def bert_vocabulary(case: Case) -> int:
    """BERT's word pieces."""
    return 1000 if case.size == "tiny" else 30522


def _bert(case: Case, *, layers: int, width: int, heads: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    tiny = case.size == "tiny"
    config = BertConfig(
        vocab_size=bert_vocabulary(case),
        num_hidden_layers=2 if tiny else layers,
        hidden_size=64 if tiny else width,
        num_attention_heads=2 if tiny else heads,
        intermediate_size=128 if tiny else 4 * width,
        max_position_embeddings=max(case.tokens, 64),
        hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
    )
    return BertForMaskedLM(config)


def bert_large(case: Case) -> nn.Module:
    """24 layers, 1024 wide, 16 heads."""
    return _bert(case, layers=24, width=1024, heads=16)


def bert_small(case: Case) -> nn.Module:
    """4 layers, 512 wide, 8 heads."""
    return _bert(case, layers=4, width=512, heads=8)


class TwoTower(nn.Module):
    """Two BERT encoders with in-batch negatives: a query's own passage is its label."""

    def __init__(self, case: Case, temperature: float = 0.05) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        tiny = case.size == "tiny"
        config = BertConfig(
            vocab_size=bert_vocabulary(case),
            num_hidden_layers=3,
            hidden_size=64 if tiny else 384,
            num_attention_heads=2 if tiny else 12,
            intermediate_size=128 if tiny else 1536,
            max_position_embeddings=max(case.tokens, 64),
            hidden_dropout_prob=case.dropout,
            attention_probs_dropout_prob=case.dropout,
        )
        self.query = BertModel(config, add_pooling_layer=False)
        self.passage = BertModel(config, add_pooling_layer=False)
        self.temperature = temperature

    @staticmethod
    def _embed(tower: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = tower(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, T, D]
        weights = mask.unsqueeze(-1).to(hidden.dtype)  # [B, T, 1]
        return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)

    def forward(
        self, query_ids: Tensor, query_mask: Tensor, passage_ids: Tensor, passage_mask: Tensor
    ) -> Tensor:
        """The mean cross-entropy of each query against all passages of the batch."""
        queries = self._embed(self.query, query_ids, query_mask)  # [B, D]
        passages = self._embed(self.passage, passage_ids, passage_mask)  # [B, D]
        return self.compared(queries @ passages.t() / self.temperature)

    @staticmethod
    def compared(scores: Tensor) -> Tensor:
        """The loss of `f32[B,B]`, each query by each passage."""
        return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class WeightedTower(TwoTower):
    """Two towers pooled by a softmax over a learned score of each real token."""

    def __init__(self, case: Case, temperature: float = 0.05) -> None:
        super().__init__(case, temperature)
        for tower in (self.query, self.passage):
            tower.score = nn.Linear(tower.config.hidden_size, 1)

    @staticmethod
    def _embed(tower: Any, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = tower(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, T, D]
        scores = tower.score(hidden).squeeze(-1)  # [B, T]
        weights = torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1)
        return nn.functional.normalize((weights.unsqueeze(1) @ hidden).squeeze(1), dim=-1)


class JoinedTower(TwoTower):
    """Two towers whose vector is the first token's state beside the mean over the real tokens."""

    @staticmethod
    def _embed(tower: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = tower(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, T, D]
        weights = mask.unsqueeze(-1).to(hidden.dtype)  # [B, T, 1]
        mean = (hidden * weights).sum(1) / weights.sum(1)
        return nn.functional.normalize(torch.cat([hidden[:, 0], mean], -1), dim=-1)


class ContrastiveTower(TwoTower):
    """Two towers pooled by the mean, with InfoNCE both ways: each passage is also scored against
    all queries."""

    @staticmethod
    def compared(scores: Tensor) -> Tensor:
        """The loss of `f32[B,B]`, each query by each passage."""
        own = torch.arange(len(scores), device=scores.device)
        there, back = (nn.functional.cross_entropy(s, own) for s in (scores, scores.t()))
        return (there + back) / 2


class TutorialTransformer(nn.Module):
    """The language model of PyTorch's `nn.Transformer` tutorial: 2 layers, 200 wide, 2 heads."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = 32 if case.size == "tiny" else 200
        vocabulary = tutorial_vocabulary(case)
        self.width = width
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(case.dropout)
        layer = nn.TransformerEncoderLayer(width, 2, width, case.dropout)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)
        position = torch.arange(case.tokens).unsqueeze(1)
        rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        places = torch.zeros(case.tokens, 1, width)
        places[:, 0, 0::2] = torch.sin(position * rate)
        places[:, 0, 1::2] = torch.cos(position * rate)
        self.register_buffer("places", places)
        mask = nn.Transformer.generate_square_subsequent_mask(case.tokens)
        self.register_buffer("mask", mask)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy of the next word; `source` and `target` are [T, B]."""
        x = self.embedding(source) * math.sqrt(self.width)
        x = self.dropout(x + self.places)
        logits = self.head(self.encoder(x, self.mask))  # [T, B, V]
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def tutorial_vocabulary(case: Case) -> int:
    """Vocabulary size of the tutorial's WikiText-2 split."""
    return 1000 if case.size == "tiny" else 28785
