"""Batches that grow up to the end of a table of positions. A plan with room for longer batches than
the table has positions is made, and may not be bound at those lengths."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import onward

VOCABULARY, END, WIDTH = 50, 32, 16
LENGTHS = (4, 20, 26, 31, 32, 24, 32)  # the plan for 26 has room for 32 or more

Lookup = Callable[["Positions", int], Tensor]  # f32[T,WIDTH] or f32[1,T,WIDTH]
LOOKUPS: dict[str, Lookup] = {
    "ids of a buffer": lambda m, T: m.positions(m.ids[:, :T]),
    "ids of a buffer, expanded": lambda m, T: m.positions(m.ids.expand(3, END)[:, :T].reshape(-1))[
        :T
    ],
    "ids of a constant": lambda m, T: m.positions(
        torch.arange(END).repeat(3, 1)[:, :T].reshape(-1)
    )[:T],
    "ids from an offset": lambda m, T: m.positions(m.ids[0, END - T :].flip(0)),
    "rows of a weight": lambda m, T: m.positions.weight[:T],
    "the last rows of a weight": lambda m, T: m.positions.weight[END - T :],
    "rows of a weight, narrowed": lambda m, T: m.positions.weight.narrow(0, 0, T),
    "rows of a buffer": lambda m, T: m.table[:1, :T],
    "columns of a buffer": lambda m, T: m.table.transpose(1, 2)[0, :, :T].T,
    "rows of a buffer, split": lambda m, T: m.table[0].split([T, END - T])[0],
    "a square of a mask": lambda m, T: m.square[:T, :T] @ m.positions.weight[:T],
}


class Positions(nn.Module):
    """Tokens i64[B,T] and positions, to the loss of labels i64[B,T]."""

    ids: Tensor
    table: Tensor
    square: Tensor

    def __init__(self, lookup: Lookup) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(END, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("ids", torch.arange(END)[None])
        self.register_buffer("table", torch.randn(3, END, WIDTH))
        self.register_buffer("square", torch.ones(END, END).tril())
        self.lookup = lookup

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.tokens(input_ids) + self.lookup(self, input_ids.shape[1])
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def batch(length: int, seed: int) -> dict[str, Tensor]:
    """Tokens i64[3,T] whose labels are half ignored, so that rows are counted."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, VOCABULARY, (2, 3, length), generator=generator).unbind()
    ignored = torch.rand(ids.shape, generator=generator) < 0.5
    return {"input_ids": ids, "labels": labels.masked_fill(ignored, -100)}


def losses(model: nn.Module) -> tuple[list[float], list[float]]:
    """Losses of training on batches of LENGTHS, by a Trainer and in eager PyTorch."""
    eager = copy.deepcopy(model)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1))
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    found: list[float] = []
    wanted: list[float] = []
    for seed, length in enumerate(LENGTHS):
        data = batch(length, seed)
        found.append(float(trainer.train_step(data).loss))
        result = eager(**data)
        loss = result if isinstance(result, Tensor) else result.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    assert trainer.plan.open, "the plan has no room for longer batches"
    return found, wanted


@pytest.mark.parametrize("name", LOOKUPS)
def test_lengths_up_to_the_end_of_a_table(name: str) -> None:
    torch.manual_seed(0)
    found, wanted = losses(Positions(LOOKUPS[name]))
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_lengths_up_to_the_longest_that_a_model_of_transformers_takes(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "bert":
        bert = BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=END,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model: nn.Module = BertForMaskedLM(bert)
    else:
        gpt2 = GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=END,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        model = GPT2LMHeadModel(gpt2)
    found, wanted = losses(model)
    assert found == pytest.approx(wanted, rel=1e-5)
