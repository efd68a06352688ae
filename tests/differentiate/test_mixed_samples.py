"""Losses in which samples depend on each other: told by what a change of one sample moves."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_families import CASES
from torch import nn

from onward.capture import CaptureRequest
from onward.compile import Compiler
from onward.differentiate import Recipe, UpdateGroup, settled
from onward.differentiate.mixed_samples import mixed_samples
from onward.errors import OnwardError
from onward.extend import OPTIMIZERS
from onward.graph.graph import Graph
from onward.kernels import host

Forward = Callable[..., torch.Tensor]


class Part(nn.Module):
    """A linear layer f32[8,8] whose loss is a function of it and the batch."""

    def __init__(self, loss: Forward) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(8, 8), loss
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self, x, y)


def contrastive(m: Part, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(m.layer(x), dim=-1) @ F.normalize(x, dim=-1).T
    return F.cross_entropy(scores, torch.arange(len(x)))


def sequence_first(m: Part, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Positions attend to each other along dim 0, as torch.nn.Transformer has them; x[:,None]."""
    return F.cross_entropy(m.attention(x, x, x)[0].flatten(0, 1), y.flatten())


MIXED: dict[str, Forward] = {
    "contrastive": contrastive,
    "as many labels": lambda m, x, y: F.cross_entropy(m.layer(x) @ x.T, torch.arange(x.shape[0])),
    "both ways": lambda m, x, y: F.cross_entropy((x @ m.layer(x).T), torch.arange(len(x))),
    "batch norm": lambda m, x, y: F.cross_entropy(m.norm(m.layer(x)), y),
    "batch norm of rows": lambda m, x, y: F.cross_entropy(
        F.batch_norm(m.layer(x).view(-1, 2, 4), None, None, training=True).flatten(1), y
    ),
    "centred": lambda m, x, y: F.cross_entropy(m.layer(x) - m.layer(x).mean(0), y),
    "softmax of samples": lambda m, x, y: F.cross_entropy(m.layer(x).softmax(0), y),
    "largest": lambda m, x, y: F.mse_loss(m.layer(x) / m.layer(x).amax(0).abs(), x),
    "distances": lambda m, x, y: F.cross_entropy(
        -((m.layer(x)[:, None] - x[None]) ** 2).sum(-1), torch.arange(x.shape[0])
    ),
    "covariance": lambda m, x, y: F.mse_loss(m.layer(x) @ (m.layer(x).T @ m.layer(x)), x),
    "scaled": lambda m, x, y: F.cross_entropy(m.layer(x) / m.layer(x).norm(), y),
}
ALONE: dict[str, Forward] = {  # more samples make a loss of pairs, which is refused as such
    "pairs one by one": lambda m, x, y: -torch.einsum("bd,cd->bc", m.layer(x), x).sigmoid().mean(),
}
APART: dict[str, Forward] = {
    "cross entropy": lambda m, x, y: F.cross_entropy(m.layer(x), y),
    "layer norm": lambda m, x, y: F.cross_entropy(F.layer_norm(m.layer(x), (8,)), y),
    "means of means": lambda m, x, y: m.layer(x).square().mean(-1).mean(),
    "masked": lambda m, x, y: (m.layer(x).square().sum(-1) * (y > 1)).sum() / (y > 1).sum(),
    "pairs": lambda m, x, y: -F.logsigmoid((m.layer(x) * x).sum(-1)).mean(),
}


def forward_of(model: nn.Module, **data: torch.Tensor) -> Graph:
    compiler = Compiler(host())
    names = tuple(inspect.signature(model.forward).parameters)
    request = CaptureRequest(model, tuple(data[name] for name in names))
    return compiler.forward(compiler.capture(request))


def recipe() -> Recipe:
    optimizer = OPTIMIZERS["SGD"]
    attributes = optimizer.attributes(torch.optim.SGD([torch.ones(1)]).param_groups[0])
    return Recipe(
        (UpdateGroup(0, ("layer.weight",), optimizer, attributes),), joint=True, average="auto"
    )


def data() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(6, 8), "y": torch.randint(8, (6,))}


@pytest.mark.parametrize("name", [*MIXED, *APART])
def test_the_table_tells_what_pytorch_does(name: str) -> None:
    """The share of the loss that two samples have moves with the others, or does not."""
    model, given = Part((MIXED | APART)[name]), data()
    few = {key: value[:2] for key, value in given.items()}
    rest = {key: value[2:] for key, value in given.items()}
    weights = [(given["y"] > 1).sum()] if name == "masked" else [torch.tensor(6)]
    weights += [
        (part["y"] > 1).sum() if name == "masked" else len(part["y"]) for part in (few, rest)
    ]
    whole = model(**given) * weights[0]
    parts = model(**few) * weights[1] + model(**rest) * weights[2]
    assert bool((whole - parts).abs() > 1e-3) == (name in MIXED)


@pytest.mark.parametrize("name", MIXED)
def test_ranks_with_a_share_refuse_what_mixes(name: str) -> None:
    forward = forward_of(Part(MIXED[name]), **data())
    with pytest.raises(
        OnwardError, match=r"would compute another loss than one process: \w+.* fix"
    ):
        settled(recipe(), forward, splits_samples=True)
    assert settled(recipe(), forward).average == "labels"  # each rank has the whole batch


@pytest.mark.parametrize("name", [*MIXED, *ALONE])
def test_ranks_with_one_sample_each_refuse_what_mixes(name: str) -> None:
    one = {key: value[:1] for key, value in data().items()}
    try:
        forward = forward_of(Part((MIXED | ALONE)[name]), **one)
    except (OnwardError, ValueError):  # PyTorch's refusal of batch norm over one value
        assert name == "batch norm"
        return
    with pytest.raises(OnwardError, match="would compute another loss than one process"):
        settled(recipe(), forward, splits_samples=True)


@pytest.mark.parametrize("name", APART)
def test_ranks_with_one_sample_each_take_what_does_not(name: str) -> None:
    one = {key: value[:1] for key, value in data().items()}
    forward = forward_of(Part(APART[name]), **one)
    assert settled(recipe(), forward, splits_samples=True).average == "labels"


@pytest.mark.parametrize("name", APART)
def test_ranks_with_a_share_take_what_does_not(name: str) -> None:
    forward = forward_of(Part(APART[name]), **data())
    assert settled(recipe(), forward, splits_samples=True).average == "labels"


def test_positions_that_come_first_do_not_mix() -> None:
    x, y = torch.randn(5, 3, 8), torch.randint(8, (5, 3))
    assert settled(recipe(), forward_of(Part(sequence_first), x=x, y=y), True).average == "labels"


@pytest.mark.sample(3)
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_models_of_transformers_do_not_mix(name: str, samples: int) -> None:
    make, data = CASES[name]
    given = {key: value[:samples] for key, value in data().items()}
    compiler = Compiler(host())
    forward = compiler.forward(compiler.capture(CaptureRequest(make(), (), given)))
    assert mixed_samples(forward) is None
