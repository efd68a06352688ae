"""What is timed: models with random weights, and token ids from real text.

No weights, tokenizer or data set is downloaded. The text is the source of Python's own standard
library; a word's id is its CRC-32 modulo the vocabulary, so that frequent words repeat as in any
language and every machine with the same Python sees the same ids.
"""

from __future__ import annotations

import math
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

_WORD = re.compile(r"\w+|[^\w\s]")
IGNORED_LABEL = -100  # what cross_entropy and every Hugging Face loss skip
_FIRST_WORD_ID = 4  # ids below are kept for padding, mask and the sentence marks


@dataclass(frozen=True)
class Case:
    """One thing to time. `precision`: fp32, tf32 (products of fp32 tensors), bf16 (autocast).

    real, labelled, fit: read by the padded workloads only. The share of tokens that are no
    padding; the share of those that have a label; whether a batch is cut to its longest sequence.
    """

    name: str
    model: str  # a key of MODELS
    batch: int  # sequences per step
    tokens: int  # per sequence; the longer side of a two-tower model
    precision: str = "fp32"
    dropout: float = 0.1
    size: str = "full"  # or "tiny", to try the scripts
    real: float = 1.0
    labelled: float = 1.0
    fit: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Input positions per step, padding included."""
        short = self.tokens // 4 if self.model.startswith("two_tower") else 0
        return self.batch * (self.tokens + short)


@dataclass(frozen=True)
class Workload:
    """How to build a model for a case, and how to turn a stream of token ids into a batch."""

    build: Callable[[Case], nn.Module]
    vocabulary: Callable[[Case], int]
    batch: Callable[[Case, Tensor, torch.Generator], Batch]
    about: str  # one line for the table


def make_model(case: Case, seed: int = 0) -> nn.Module:
    """A model in training mode; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return MODELS[case.model].build(case).train()


def make_batches(case: Case, count: int) -> list[Batch]:
    """`count` distinct batches on the CPU, the same ones for every engine."""
    workload = MODELS[case.model]
    per_batch = case.tokens_per_step + case.batch  # one token more per sequence, for next words
    ids = _token_ids(workload.vocabulary(case), count * per_batch)
    generator = torch.Generator().manual_seed(1234)
    chunks = ids.reshape(count, per_batch)
    batches = [workload.batch(case, chunk, generator) for chunk in chunks]
    firsts = {next(iter(batch.values())).numpy().tobytes() for batch in batches}
    if len(firsts) != count:
        raise AssertionError("two batches are equal: a step could be served from a cache")
    return batches


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


def _words() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        yield from _WORD.findall(path.read_text(encoding="utf-8", errors="ignore"))


def _token_ids(vocabulary: int, count: int) -> Tensor:
    span = vocabulary - _FIRST_WORD_ID
    ids = (_FIRST_WORD_ID + zlib.crc32(word.encode()) % span for word in islice(_words(), count))
    found = torch.tensor(list(ids))
    if len(found) < count:
        raise ValueError(f"{count} tokens asked for, {len(found)} there: fewer or smaller steps")
    return found


def _causal_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    del generator
    tokens = ids[: case.batch * case.tokens].reshape(case.batch, case.tokens)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _next_word_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    del generator
    columns = ids.reshape(case.batch, case.tokens + 1)
    return {"source": columns[:, :-1].t().contiguous(), "target": columns[:, 1:].t().contiguous()}


def _masked_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
    """All positions real, 15 % of them labelled; those read the mask id (no 80/10/10 split)."""
    tokens = ids[: case.batch * case.tokens].reshape(case.batch, case.tokens)
    chosen = torch.rand(tokens.shape, generator=generator) < 0.15
    return {
        "input_ids": tokens.masked_fill(chosen, 3),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~chosen, IGNORED_LABEL),
    }


def _pair_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
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


def _padded_masked_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
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


def _padded_pair_batch(case: Case, ids: Tensor, generator: torch.Generator) -> Batch:
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


def _gpt2(case: Case, *, layers: int, width: int, heads: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    tiny = case.size == "tiny"
    config = GPT2Config(
        n_layer=2 if tiny else layers,
        n_embd=64 if tiny else width,
        n_head=2 if tiny else heads,
        vocab_size=_gpt2_vocabulary(case),
        n_positions=max(case.tokens, 64),
        resid_pdrop=case.dropout,
        embd_pdrop=case.dropout,
        attn_pdrop=case.dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def _gpt2_vocabulary(case: Case) -> int:
    return 1000 if case.size == "tiny" else 50257


def _gpt2_small(case: Case) -> nn.Module:
    return _gpt2(case, layers=4, width=512, heads=8)


def _gpt2_medium(case: Case) -> nn.Module:
    return _gpt2(case, layers=24, width=1024, heads=16)


def _bert_vocabulary(case: Case) -> int:
    return 1000 if case.size == "tiny" else 30522


def _bert(case: Case, *, layers: int, width: int, heads: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    tiny = case.size == "tiny"
    config = BertConfig(
        vocab_size=_bert_vocabulary(case),
        num_hidden_layers=2 if tiny else layers,
        hidden_size=64 if tiny else width,
        num_attention_heads=2 if tiny else heads,
        intermediate_size=128 if tiny else 4 * width,
        max_position_embeddings=max(case.tokens, 64),
        hidden_dropout_prob=case.dropout,
        attention_probs_dropout_prob=case.dropout,
    )
    return BertForMaskedLM(config)


def _bert_large(case: Case) -> nn.Module:
    return _bert(case, layers=24, width=1024, heads=16)


def _bert_small(case: Case) -> nn.Module:
    return _bert(case, layers=4, width=512, heads=8)


class TwoTower(nn.Module):
    """Two BERT encoders with in-batch negatives: a query's own passage is its label."""

    def __init__(self, case: Case, temperature: float = 0.05) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        tiny = case.size == "tiny"
        config = BertConfig(
            vocab_size=_bert_vocabulary(case),
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
        scores = queries @ passages.t() / self.temperature  # [B, B]
        return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class TutorialTransformer(nn.Module):
    """The language model of PyTorch's `nn.Transformer` tutorial: 2 layers, 200 wide, 2 heads."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = 32 if case.size == "tiny" else 200
        vocabulary = _tutorial_vocabulary(case)
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


def _tutorial_vocabulary(case: Case) -> int:
    return 1000 if case.size == "tiny" else 28785  # that of the tutorial's WikiText-2 split


MODELS: dict[str, Workload] = {
    "gpt2_small": Workload(
        _gpt2_small, _gpt2_vocabulary, _causal_batch, "GPT-2, 4 layers, 512 wide, 8 heads, V=50257"
    ),
    "gpt2_medium": Workload(
        _gpt2_medium, _gpt2_vocabulary, _causal_batch, "GPT-2 medium, 24 layers, 1024 wide, V=50257"
    ),
    "bert_large": Workload(
        _bert_large, _bert_vocabulary, _masked_batch, "BERT-large MLM, 15 % labelled, no padding"
    ),
    "tutorial": Workload(
        TutorialTransformer,
        _tutorial_vocabulary,
        _next_word_batch,
        "nn.Transformer tutorial, 2 layers, 200 wide, V=28785",
    ),
    "two_tower": Workload(
        TwoTower,
        _bert_vocabulary,
        _pair_batch,
        "two BERT towers, 3 layers, 384 wide, queries a quarter as long, 25 % padding",
    ),
    "bert_padded": Workload(
        _bert_small,
        _bert_vocabulary,
        _padded_masked_batch,
        "BERT MLM, 4 layers, 512 wide, 8 heads, V=30522",
    ),
    "two_tower_padded": Workload(
        TwoTower,
        _bert_vocabulary,
        _padded_pair_batch,
        "two BERT towers, 3 layers, 384 wide, queries a quarter as long",
    ),
}
