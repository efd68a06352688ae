"""Attention under a bias that is trained: loss and gradients are eager's, on rows that are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tiny import compiled, gradients_of, packed_gradients
from tiny_families import CASES, assert_same
from torch import Tensor, nn

import onward

WIDTH, HEADS, LENGTH = 12, 3, 9
LEAST = torch.finfo(torch.float32).min
Bias = Callable[["Attending", Tensor, Tensor], Tensor]


class Attending(nn.Module):
    """A layer of attention whose mask `bias(self, x, mask)` makes; its loss reads real rows."""

    def __init__(self, bias: Bias, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made, self.by_hand = bias, by_hand
        self.words = nn.Embedding(40, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)
        self.table = nn.Parameter(torch.randn(HEADS, 2 * LENGTH))
        self.near = nn.Parameter(torch.randn(2 * LENGTH, 2 * LENGTH))
        self.slopes = nn.Parameter(torch.rand(HEADS, 1, 1))
        self.project = nn.Linear(WIDTH, HEADS)

    def places(self, n: int) -> Tensor:
        """Distances of keys from queries, `i64[T,T]`, shifted to be indices."""
        at = torch.arange(n)
        return at[None, :] - at[:, None] + LENGTH

    def relative(self, n: int) -> Tensor:
        """A bias by relative position, `f32[1,H,T,T]`, as in T5."""
        return self.table.t()[self.places(n)].permute(2, 0, 1).unsqueeze(0)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        parts = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        bias = self.made(self, x, mask)
        if self.by_hand:
            s = (q @ k.mT / 2.0 + bias).masked_fill(mask[:, None, None] == 0, -torch.inf)
            y = s.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, bias)
        y = self.out(y.transpose(1, 2).flatten(2)) + x
        return F.cross_entropy(self.head(y).transpose(1, 2), labels, ignore_index=-100)


def hides(mask: Tensor) -> Tensor:
    """A mask to add, `f32[B,1,1,T]`: the least number where a key is padding."""
    return (1.0 - mask[:, None, None].float()) * LEAST


def chosen(mask: Tensor) -> Tensor:
    return torch.where(mask[:, None, None] != 0, 0.0, LEAST)


BIASES: dict[str, Bias] = {
    "relative places": lambda m, x, mask: m.relative(x.shape[1]) + hides(mask),
    "the mask first": lambda m, x, mask: hides(mask) + m.relative(x.shape[1]),
    "a mask that is chosen": lambda m, x, mask: m.relative(x.shape[1]) + chosen(mask),
    "no mask": lambda m, x, mask: m.relative(x.shape[1]),
    "three dims": lambda m, x, mask: m.relative(x.shape[1])[0] + hides(mask),
    "all heads alike": lambda m, x, mask: m.near[: x.shape[1], : x.shape[1]] + hides(mask),
    "slopes": lambda m, x, mask: m.slopes * m.places(x.shape[1]) + hides(mask),
    "two that are trained": lambda m, x, mask: (
        m.relative(x.shape[1]) + m.near[: x.shape[1], : x.shape[1]] + hides(mask)
    ),
    "one for each key": lambda m, x, mask: m.project(x).permute(0, 2, 1).unsqueeze(2) + hides(mask),
    "differs from sample to sample": lambda m, x, mask: (
        m.project(x).permute(0, 2, 1).unsqueeze(2) * m.slopes + m.relative(x.shape[1]) + hides(mask)
    ),
    "some hidden by it": lambda m, x, mask: (
        m.relative(x.shape[1]).masked_fill(m.places(x.shape[1]) > LENGTH + 2, -torch.inf)
        + hides(mask)
    ),
    "minus the mask": lambda m, x, mask: m.relative(x.shape[1]) - hides(mask).abs(),
    "detached": lambda m, x, mask: m.relative(x.shape[1]).detach() + hides(mask),
    "half of it detached": lambda m, x, mask: (
        m.relative(x.shape[1]) + m.near[: x.shape[1], : x.shape[1]].detach() + hides(mask)
    ),
}


def batch(rows: int, length: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(0, 40, (rows, length), generator=g)
    mask = torch.ones_like(ids)
    for i in range(1, rows):
        mask[i, length - i :] = 0
    labels = torch.randint(0, 5, ids.shape, generator=g).masked_fill(mask == 0, -100)
    return {"ids": ids, "mask": mask, "labels": labels}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BIASES)
def test_layers_under_a_trained_bias_equal_eager(name: str) -> None:
    model, data = Attending(BIASES[name]), [batch(3, 8), batch(4, LENGTH), batch(2, 5)]
    assert_same(gradients_of(model, data), model, data)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [
        "relative places",
        "slopes",
        "some hidden by it",
        "differs from sample to sample",
        "one for each key",
    ],
)
def test_steps_under_a_trained_bias_equal_eager(name: str) -> None:
    """The Trainer, which computes only the rows that are read, follows eager PyTorch."""
    model, other = Attending(BIASES[name]), Attending(BIASES[name])
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.5))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    batches: list[dict[str, Any]] = [batch(3, 8), batch(4, LENGTH), batch(3, 8)]
    for data in batches:
        loss = other(**data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.train_step(**data).loss, loss.detach())
    for have, want in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-6)


def flash(model: nn.Module, data: dict[str, Tensor]) -> list[bool]:
    """Whether each FlashAttention of the model trains a bias; attention that keeps scores is left
    out."""
    nodes = [n for n in compiled(model, data).forward if n.op_type == "FlashAttention"]
    return ["bias_gradient" in n.attributes for n in nodes]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BIASES)
def test_no_scores_are_kept(name: str) -> None:
    model = Attending(BIASES[name])
    assert flash(model, batch(3, 8)) == [name != "detached"]


@pytest.mark.parametrize("name", ["T5", "T5 with both masks"])
def test_t5_computes_the_rows_that_are_read(name: str) -> None:
    """Encoder and decoder of T5 pack their rows; the biases of their first layers serve all
    others."""
    make, data_of = CASES[name]
    model, data = make(), data_of()
    assert all(flash(model, data)[:1])
    found, counts = packed_gradients(model, data)
    assert int(data["attention_mask"].sum()) in counts.values()
    assert_same([found], model, [data])


def test_t5_with_a_sample_of_padding_alone() -> None:
    """A sample of padding sees no key, so that its scores and biases vanish under the mask: it
    takes a capture of its own."""
    make, data_of = CASES["T5"]
    model, data = cast(Any, make()), data_of()
    model.set_attn_implementation("eager")  # torch's sdpa has no gradient there
    data["attention_mask"][1] = 0
    assert_same(gradients_of(model, [data]), model, [data])


# Biases under a filled mask, and whether rows are packed: only a bias of positions alone allows it.
UNDER_A_FILL: dict[str, tuple[Bias, bool]] = {
    "relative places": (lambda m, x, mask: m.relative(x.shape[1]), True),
    "slopes": (lambda m, x, mask: m.slopes * m.places(x.shape[1]), True),
    "all heads alike": (lambda m, x, mask: m.near[: x.shape[1], : x.shape[1]], True),
    "detached": (lambda m, x, mask: m.relative(x.shape[1]).detach(), True),
    "one for each key": (lambda m, x, mask: m.project(x).permute(0, 2, 1).unsqueeze(2), False),
    "differs from sample to sample": (
        lambda m, x, mask: (
            m.project(x).permute(0, 2, 1).unsqueeze(2) * m.slopes + m.relative(x.shape[1])
        ),
        False,
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", UNDER_A_FILL)
def test_rows_are_packed_under_a_bias_of_positions(name: str) -> None:
    bias, packs = UNDER_A_FILL[name]
    model, data = Attending(bias, by_hand=True), [batch(3, 8), batch(4, LENGTH), batch(2, 5)]
    assert_same(gradients_of(model, data), model, data)
    found, counts = packed_gradients(model, data[0])
    assert_same([found], model, data[:1])
    kept = onward.Trainer(model, onward.optim.SGD(lr=0.1)).explain(data[0]).kept
    assert (not kept) == packs, kept
    assert packs or any("its bias differs from sample to sample" in k.why for k in kept)
    assert not packs or int(data[0]["mask"].sum()) in counts.values()
