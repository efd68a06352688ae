"""fp16 with a loss scale on whole models, dropout off, beside eager PyTorch under autocast.

Per tensor, the distance of loss and gradients to an fp64 run is at most 1.25 times that of
`torch.autocast` in fp16 with the same scale, as a root mean square over four batches; of a few
numbers twice that, and a quarter of a unit of fp16. Of families it is the median over more batches,
since the sign of a ReLU's operand near 0 is a draw of either side, and a tensor of fewer than 128
numbers counts as few: a classifier's are sums over four rows.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from near_autocast import FEW, ROOM, assert_as_near, autocast, shuffled
from tiny import (
    PADDINGS,
    Tensors,
    batch,
    bert,
    compiled,
    eager,
    execute,
    execute_packed,
    gpt2,
    plain,
    trained,
)
from tiny_families import CASES, rms
from torch import nn

from onward.graph.types import DType
from onward.rewrite import Policy

pytestmark = pytest.mark.usefixtures("captures_kept")
FP16 = Policy(DType.FLOAT16)
SCALE = 2.0**12
KINDS: dict[str, Any] = {"gpt2": gpt2, "bert": bert}
WIDE = {"layers": 2, "width": 256}


def ours(
    model: nn.Module, batches: list[Tensors], packed: bool = False, scale: float = SCALE
) -> list[Tensors]:
    """Loss and gradients of Onward's fp16 graph for each batch, divided by the loss scale."""
    found, feeds = [], {"cotangent.loss": scale}
    made = compiled(model, batches[0], policy=FP16)
    forward = made.packed(["loss"]) if packed else made.forward
    assert forward is not None
    graph = made.differentiated(trained(made), forward)
    names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
    for data in batches:
        if packed:
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(execute.__globals__["FEEDS"], "cotangent.loss", scale)
                results, _ = execute_packed(made, graph, data, names)
        else:
            results = execute(made, graph, data, names, **feeds)
        found.append({n: x if n == "loss" else x / scale for n, x in plain(results).items()})
    return found


def assert_near(
    model: nn.Module,
    batches: list[Tensors],
    own: list[Tensors],
    mean: Callable[[list[float]], float] = rms,
    few: int = FEW,
) -> None:
    exact = [eager(model, data, torch.float64) for data in batches]
    theirs = [autocast(model, data, torch.float16, SCALE) for data in batches]
    assert_as_near(exact, theirs, own, torch.float16, ROOM, mean, few)


@pytest.mark.sample(16)
@pytest.mark.parametrize("family", CASES)
def test_families_are_as_near_as_autocast_in_fp16(family: str) -> None:
    make, data = CASES[family]
    torch.manual_seed(0)
    model = make().train()
    batches = [shuffled(data(), seed) for seed in range(33)]  # of 11 the median is a draw
    assert_near(model, batches, ours(model, batches), median, few=128)


@pytest.mark.sample(6)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_realistic_width_in_fp16(kind: str, padding: str) -> None:
    model = KINDS[kind](dropout=0.0, **WIDE)
    batches = [batch(4, 12, padding=padding, seed=seed) for seed in range(1, 5)]
    assert_near(model, batches, ours(model, batches))


@pytest.mark.sample(2)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_only_the_rows_that_are_read_in_fp16(padding: str) -> None:
    model = bert(dropout=0.0, **WIDE)
    batches = [batch(4, 12, padding=padding, seed=seed, ignored=True) for seed in range(1, 5)]
    assert_near(model, batches, ours(model, batches, packed=True))


def attended(kind: str, fill: float) -> nn.Module:
    """Attention by hand, whose mask hides by a number: added to the scores, or filled in; or a
    constant of the model is added."""

    class Attended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(97, 32)
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
            self.head = nn.Linear(32, 97)

        def forward(
            self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor
        ) -> torch.Tensor:
            x = self.table(input_ids)
            scores = self.q(x) @ self.k(x).transpose(1, 2)
            if kind == "constant":  # to what a product gives in fp16; it hides all of the first
                scores = scores + torch.triu(torch.full((12, 12), fill))
            elif kind == "added":
                scores = scores + (1.0 - attention_mask[:, None].float()) * fill
            else:
                wide = scores if scores.dtype == torch.float64 else scores.float()
                scores = wide.masked_fill(attention_mask[:, None] == 0, fill)
            logits = self.head(torch.softmax(scores, -1) @ self.v(x))
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    return Attended().train()


LEAST = float(torch.finfo(torch.float32).min)


@pytest.mark.sample(5)
@pytest.mark.parametrize("fill", [LEAST, -1e9, -65504.0, -1e4])
@pytest.mark.parametrize("kind", ["added", "filled", "constant"])
@pytest.mark.parametrize("hidden", [False, True], ids=["padded", "a row without any token"])
def test_masks_of_numbers_that_fp16_does_not_have(kind: str, fill: float, hidden: bool) -> None:
    """-3.4e38 is -inf in fp16, and a row of them would be NaN: scores and softmax stay fp32."""
    model = attended(kind, fill)
    batches = [batch(4, 12, padding="right", seed=seed) for seed in range(1, 5)]
    for data in batches:
        if hidden:
            data["attention_mask"][0] = 0
    own = ours(model, batches)
    assert all(x.isfinite().all() for found in own for x in found.values())
    assert_near(model, batches, own)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padded_bert_whose_mask_is_the_least_number(attention: str) -> None:
    """transformers' own mask of both kinds of attention, one row padded as a whole."""
    model = bert(dropout=0.0, attn_implementation=attention)
    batches = [batch(4, 12, padding="right", seed=seed) for seed in range(1, 5)]
    for data in batches:
        data["attention_mask"][1] = 0
    own = ours(model, batches)
    assert all(x.isfinite().all() for found in own for x in found.values())
    assert_near(model, batches, own)


def test_activations_that_overflow_are_infinite_as_under_autocast() -> None:
    """A product beyond 65504 is infinite in both; what follows it in fp32 is so too."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).float().square().mean() * 1e-9

    torch.manual_seed(0)
    model = Large()
    for size in (1.0, 1e3, 1e5, 1e6):
        data = {"x": torch.full((4, 8), size)}
        (own,), theirs = ours(model, [data], scale=1.0), autocast(model, data, torch.float16)
        for name, x in theirs.items():
            assert torch.equal(x.isfinite(), own[name].isfinite()), (size, name)
            torch.testing.assert_close(own[name], x, rtol=4e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("number", [1e5, 0.1, -3e38])
def test_constants_that_fp16_does_not_have_stay_fp32(number: float) -> None:
    """What they are added to was a product in fp16."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.maximum(self.a(x), torch.full((8,), -abs(number)))
            return (y + torch.linspace(0.5, 1.0, 8) * number).mean()

    torch.manual_seed(0)
    model, data = Shifted(), {"x": torch.randn(4, 8)}
    (own,), theirs = ours(model, [data], scale=1.0), autocast(model, data, torch.float16)
    for name, x in theirs.items():
        torch.testing.assert_close(own[name], x, rtol=1e-5 if name == "loss" else 4e-3, atol=1e-4)
