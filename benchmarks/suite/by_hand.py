"""Padding and unlabelled rows spared by hand, in plain PyTorch: two peers of the padded benchmark.

What onnxruntime's training switches call label sparsity and embedding sparsity. Both hold the
modules of the model they are given, so that weights are its own, and give its loss (with dropout
on they draw other masks).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, scaled_dot_product_attention

from suite.batches import IGNORED_LABEL
from suite.models import JoinedTower, TwoTower, WeightedTower

# Modules of transformers are Any below: their submodules have no types.


class LabelledRows(nn.Module):
    """A masked language model whose head (transform, decoder, loss) reads labelled rows only."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labelled tokens."""
        hidden = self.model.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        return _labelled_loss(self.model.cls, hidden.flatten(0, 1), labels.flatten())


class RealRows(nn.Module):
    """A masked language model without padding outside attention's scores; the head as above.

    A label on padding is not read.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the labelled tokens."""
        rows, index = _packed(self.model.bert, input_ids, attention_mask)
        return _labelled_loss(self.model.cls, rows, labels.flatten().index_select(0, index))


class RealTowers(nn.Module):
    """Two towers without padding outside attention's scores; the mean is over packed rows."""

    def __init__(self, model: TwoTower) -> None:
        super().__init__()
        self.model = model

    @staticmethod
    def _embed(tower: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        rows, index = _packed(tower, ids, mask)  # [N, D]
        sums = rows.new_zeros(len(ids), rows.shape[1]).index_add(0, index // ids.shape[1], rows)
        return normalize(sums / mask.sum(1, keepdim=True), dim=-1)

    def forward(
        self, query_ids: Tensor, query_mask: Tensor, passage_ids: Tensor, passage_mask: Tensor
    ) -> Tensor:
        """The mean cross-entropy of each query against all passages of the batch."""
        queries = self._embed(self.model.query, query_ids, query_mask)  # [B, D]
        passages = self._embed(self.model.passage, passage_ids, passage_mask)  # [B, D]
        return self.model.compared(queries @ passages.t() / self.model.temperature)


class RealWeightedTowers(RealTowers):
    """The softmax over the packed rows of each sequence, by sums of exponentials."""

    @staticmethod
    def _embed(tower: Any, ids: Tensor, mask: Tensor) -> Tensor:
        rows, index = _packed(tower, ids, mask)  # [N, D]
        places, scores = index // ids.shape[1], tower.score(rows)  # [N], [N, 1]
        weights = torch.exp(scores - scores.detach().max())
        total = rows.new_zeros(len(ids), 1).index_add(0, places, weights)
        sums = rows.new_zeros(len(ids), rows.shape[1]).index_add(0, places, rows * weights)
        return normalize(sums / total, dim=-1)


class RealJoinedTowers(RealTowers):
    """The first token's row beside the mean; a sequence begins with a real token."""

    @staticmethod
    def _embed(tower: Any, ids: Tensor, mask: Tensor) -> Tensor:
        rows, index = _packed(tower, ids, mask)  # [N, D]
        sums = rows.new_zeros(len(ids), rows.shape[1]).index_add(0, index // ids.shape[1], rows)
        first = (index % ids.shape[1] == 0).nonzero().squeeze(1)
        vectors = [rows.index_select(0, first), sums / mask.sum(1, keepdim=True)]
        return normalize(torch.cat(vectors, -1), dim=-1)


def labelled_rows(model: nn.Module) -> nn.Module:
    """The masked language model with a sparse head."""
    return LabelledRows(model)


def real_rows(model: nn.Module) -> nn.Module:
    """The model without padding; with a sparse head where it has labels."""
    for kind, towers in ((WeightedTower, RealWeightedTowers), (JoinedTower, RealJoinedTowers)):
        if isinstance(model, kind):
            return towers(model)
    return RealTowers(model) if isinstance(model, TwoTower) else RealRows(model)


def _labelled_loss(head: nn.Module, rows: Tensor, labels: Tensor) -> Tensor:
    chosen = (labels != IGNORED_LABEL).nonzero().squeeze(1)
    return cross_entropy(head(rows.index_select(0, chosen)), labels.index_select(0, chosen))


def _packed(bert: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`f32[N,D]`, the last layer's real rows, and `i64[N]`, their places in `[B*T]`.

    The embeddings already read real tokens only, which saves a little more than packing them.
    """
    index = mask.flatten().nonzero().squeeze(1)
    rows = bert.embeddings(
        input_ids=ids.flatten().index_select(0, index).unsqueeze(0),
        position_ids=(index % ids.shape[1]).unsqueeze(0),
    ).squeeze(0)
    lowest = torch.finfo(rows.dtype).min
    bias = rows.new_zeros(mask.shape).masked_fill(mask == 0, lowest)[:, None, None, :]
    for layer in bert.encoder.layer:
        context = _attention(layer.attention.self, rows, index, bias)
        rows = layer.feed_forward_chunk(layer.attention.output(context, rows))
    return rows, index


def _attention(module: Any, rows: Tensor, index: Tensor, bias: Tensor) -> Tensor:
    batch, tokens = bias.shape[0], bias.shape[-1]

    def padded(x: Tensor) -> Tensor:  # [N, D] to [B, H, T, D / H]
        full = x.new_zeros(batch * tokens, x.shape[1]).index_copy(0, index, x)
        return full.view(batch, tokens, module.num_attention_heads, -1).transpose(1, 2)

    y = scaled_dot_product_attention(
        padded(module.query(rows)), padded(module.key(rows)), padded(module.value(rows)),
        attn_mask=bias, dropout_p=module.dropout.p if module.training else 0.0,
        scale=module.scaling,
    )  # fmt: skip
    return y.transpose(1, 2).reshape(batch * tokens, -1).index_select(0, index)
