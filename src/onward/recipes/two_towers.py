"""Two towers: texts become vectors by encoders of transformers, and pairs of vectors scores.

Crossed by a cosine, a folder that is written is a model of sentence-transformers as well: its
encoder, `modules.json` and the settings of its pooling. Two encoders are two such folders, the
query's outside and the document's inside. What neither library has, learned pooling and a crossing
layer, lies beside them in `two_towers.safetensors`.

The model with learned pooling and a residual layer is TwinBERT's (arXiv 2002.06275), the loss with
the batch's other documents as wrong ones that of arXiv 1705.00652.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from onward.recipes.tower_settings import (
    DOCUMENT,
    HEAD_FILE,
    WITHOUT_WEIGHTS,
    Pooling,
    TowerSettings,
    write_modules,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCALE = 20.0  # of cosines in the softmax, as sentence-transformers' MultipleNegativesRankingLoss


@dataclass
class TowersOutput(ModelOutput):
    """loss: f32[], None without a document. logits: f32[B], of a pair to belong together; with
    in-batch negatives f32[B,N], of each query (rows) beside each document. query_embeds: f32[B,D].
    document_embeds: f32[N,D], N a multiple of B: the queries' own documents, then negatives."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    query_embeds: Tensor | None = None
    document_embeds: Tensor | None = None


class Tower(nn.Module):
    """An encoder with its pooling.

    weight: scores states for the learned pooling; None for the others. unit: whether a vector has
    the length 1.
    """

    def __init__(
        self, encoder: nn.Module, pooling: Pooling, weight: nn.Linear | None, unit: bool
    ) -> None:
        super().__init__()
        self.encoder, self.pooling, self.weight, self.unit = encoder, pooling, weight, unit

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The vectors f32[B,D] of texts i64[B,T]."""
        states: Tensor = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask
        ).last_hidden_state  # [B, T, D]
        if self.pooling == "cls":
            pooled = states[:, 0]
        elif self.pooling == "lasttoken":
            places = torch.arange(1, states.shape[1] + 1, device=states.device)
            places = places * attention_mask  # [B, T], 0 for padding on either side
            last = (places == places.amax(1, keepdim=True)).unsqueeze(-1)  # [B, T, 1]
            pooled = (states * last.to(states.dtype)).sum(1)
        elif self.weight is None:
            real = attention_mask.unsqueeze(-1).to(states.dtype)  # [B, T, 1]
            pooled = (states * real).sum(1) / real.sum(1).clamp(min=1e-9)
        else:
            scores = self.weight(states).squeeze(-1)  # [B, T]
            scores = scores.masked_fill(attention_mask == 0, torch.finfo(scores.dtype).min)
            pooled = (scores.softmax(-1).unsqueeze(-1) * states).sum(1)
        return nn.functional.normalize(pooled, dim=-1) if self.unit else pooled


class PairScore(nn.Module):
    """Scores pairs of vectors: by a residual layer, or by the line over their cosine.

    width: D, of the residual layer; None for the cosine.
    """

    def __init__(self, width: int | None) -> None:
        super().__init__()
        self.residual = None if width is None else nn.Linear(width, width)
        self.score = nn.Linear(width or 1, 1)
        if width is None:  # of a cosine c the logit is 10 (c - 1/2) before it is learnt
            nn.init.constant_(self.score.weight, 10.0)
            nn.init.constant_(self.score.bias, -5.0)

    def forward(self, query_embeds: Tensor, document_embeds: Tensor) -> Tensor:
        """The logits f32[B] of pairs f32[B,D] to belong together."""
        if self.residual is None:
            found = (query_embeds * document_embeds).sum(-1, keepdim=True)  # the cosine [B, 1]
        else:
            most = torch.maximum(query_embeds, document_embeds)
            found = most + nn.functional.relu(self.residual(most))
        return self.score(found).squeeze(-1)


class TwoTowers(nn.Module):
    """Scores pairs of a query and a document.

    config: of the encoders, with the settings of the towers. query, document: the towers, of which
    the encoder is one module where they are shared.
    """

    def __init__(
        self,
        encoder: PreTrainedModel,
        settings: TowerSettings,
        document: PreTrainedModel | None = None,
    ) -> None:
        super().__init__()
        self.config: Any = encoder.config
        self.settings = settings
        width: int = self.config.hidden_size
        weight = nn.Linear(width, 1) if settings.pooling == "weighted" else None
        other = (document or copy.deepcopy(encoder)) if settings.separate else encoder
        unit = settings.crossing == "cosine"
        self.query = Tower(encoder, settings.pooling, weight, unit)
        self.document = Tower(other, settings.pooling, weight, unit)
        self.crossing = PairScore(width if settings.crossing == "residual" else None)
        self.crossing.requires_grad_(settings.labelled)

    def forward(
        self,
        query_input_ids: Tensor,
        query_attention_mask: Tensor,
        document_input_ids: Tensor,
        document_attention_mask: Tensor,
        labels: Tensor | None = None,
    ) -> TowersOutput:
        """The mean loss of B pairs of texts i64[B,T]; below the own documents there may be
        negatives, whose inputs are then i64[N,T]. labels: f32[B], 0 to 1, where the pairs have
        labels."""
        query = self.query(query_input_ids, query_attention_mask)  # [B, D]
        document = self.document(document_input_ids, document_attention_mask)
        if not self.settings.labelled:
            logits = SCALE * query @ document.T  # [B, N]
            own = torch.arange(logits.shape[0], device=logits.device)
            loss = nn.functional.cross_entropy(logits, own)
            return TowersOutput(loss, logits, query, document)
        logits = self.crossing(query, document)
        loss = None
        if labels is not None:
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return TowersOutput(loss, logits, query, document)

    def gradient_checkpointing_enable(self, *given: Any, **named: Any) -> None:
        """Computes the layers of both encoders again in the backward pass, as transformers does."""
        for encoder in self._encoders():
            encoder.gradient_checkpointing_enable(*given, **named)

    def _encoders(self) -> Iterator[Any]:
        yield self.query.encoder
        if self.settings.separate:
            yield self.document.encoder

    def head(self) -> dict[str, Tensor]:
        """The weights that the encoders do not have, by their names."""
        return {
            name: value.detach()
            for name, value in self.state_dict().items()
            if ".encoder." not in name and not name.startswith("document.weight")
        }

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the encoders and the rest into an existing folder."""
        folder = Path(folder)
        places = [folder, folder / DOCUMENT][: 1 + self.settings.separate]
        for place, encoder in zip(places, self._encoders(), strict=True):
            encoder.save_pretrained(place)
            if self.settings.crossing == "cosine" and self.settings.pooling in WITHOUT_WEIGHTS:
                write_modules(place, self.settings.pooling, self.config.hidden_size)
        save_file(self.head(), folder / HEAD_FILE)


__all__ = ["PairScore", "Tower", "TowersOutput", "TwoTowers"]
