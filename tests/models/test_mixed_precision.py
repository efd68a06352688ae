"""Mixed precision on whole models, dropout off, beside eager PyTorch under autocast.

The law is that of `near_autocast.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from near_autocast import assert_near, shuffled
from tiny import (
    PADDINGS,
    batch,
    bert,
    compiled,
    gpt2,
    gradients_of,
    packed_gradients,
    tokens,
)
from tiny_families import CASES

from onward.graph.graph import Graph, Node, type_of
from onward.graph.types import DType
from onward.plan.views import VIEWS
from onward.rewrite import Policy

pytestmark = pytest.mark.usefixtures("captures_kept")
BF16 = Policy(DType.BFLOAT16)
WIDE = {"layers": 2, "width": 256}


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", CASES)
def test_families_are_as_near_as_autocast(family: str) -> None:
    make, data = CASES[family]
    torch.manual_seed(0)
    model = make().train()
    batches = [shuffled(data(), seed) for seed in range(64)]  # of 4 the mean is a draw
    assert_near(model, batches, gradients_of(model, batches, policy=BF16))


WHOLE: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "bert": bert}


@pytest.mark.sample(3)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", WHOLE)
def test_a_realistic_width(kind: str, padding: str) -> None:
    model = WHOLE[kind](dropout=0.0, **WIDE)
    batches = [batch(4, 12, padding=padding, seed=seed) for seed in range(1, 5)]
    assert_near(model, batches, gradients_of(model, batches, policy=BF16))


@pytest.mark.parametrize("padding", ["right", "left"])
def test_only_the_rows_that_are_read(padding: str) -> None:
    """Packed rows in mixed precision are as near as autocast on all rows."""
    model = bert(dropout=0.0, **WIDE)
    batches = [batch(4, 12, padding=padding, seed=seed, ignored=True) for seed in range(1, 5)]
    ours = [packed_gradients(model, data, policy=BF16)[0] for data in batches]
    assert_near(model, batches, ours)


def products(graph: Graph) -> list[Node]:
    return [n for n in graph if n.op_type in ("Gemm", "MatMul")]


def casts_of_parameters(graph: Graph) -> list[tuple[str, bool]]:
    """The parameters that are cast, each with whether its cast is in the backward half."""
    return [
        (n.inputs[0].name or "", bool(n.meta.get("backward")))
        for n in graph
        if n.op_type == "Cast" and n.inputs[0] is not None and n.inputs[0].producer() is None
    ]


def readers_of(node: Node) -> list[Node]:
    """The nodes that read a node's result, directly or through views."""
    found: list[Node] = []
    for reader in node.outputs[0].consumers():
        found += readers_of(reader) if reader.op_type in VIEWS else [reader]
    return found


class Experts(torch.nn.Module):
    """A model whose forward and backward halves both read a view of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.v = torch.nn.Parameter(torch.randn(4))
        self.w = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * self.v) @ self.w.view(16, 4, 4)).square().mean()


def cast_by_each_half(step: Graph) -> bool:
    """Whether no copy of a weight, nor a view of one, lives through both halves."""
    cast = casts_of_parameters(step)
    assert len(cast) == len(set(cast))
    assert {half for _, half in cast} == {False, True}
    forward = [n for n in step if n.op_type == "Cast" and not n.meta.get("backward")]
    copies = [n for n in forward if n.inputs[0] is not None and n.inputs[0].producer() is None]
    return not any(r.meta.get("backward") for n in copies for r in readers_of(n))


def test_views_of_copies_are_not_kept() -> None:
    made = compiled(Experts(), {"x": torch.randn(16, 3, 4)}, policy=BF16)
    assert cast_by_each_half(made.differentiated(list(made.captured.parameters)))


@pytest.mark.parametrize("kind", WHOLE)
def test_products_are_low_and_each_weight_is_cast_once_a_half(kind: str) -> None:
    data = batch(4, 12)
    made = compiled(WHOLE[kind](dropout=0.0), data, policy=BF16)
    step = made.differentiated(list(made.captured.parameters))
    assert products(step)
    for node in products(step):
        assert type_of(node.outputs[0]).dtype == DType.BFLOAT16
    assert cast_by_each_half(step)
    for name, value in step.outputs.items():
        if name.startswith("grad."):
            assert type_of(value).dtype == DType.FLOAT, name


@pytest.mark.parametrize("pattern", ["*.attn", "Gemm", "transformer.h.0", "lm_head"])
def test_modules_and_ops_that_are_kept_in_fp32(pattern: str) -> None:
    data = batch(4, 12)
    made = compiled(gpt2(dropout=0.0), data, policy=Policy(DType.BFLOAT16, (pattern,)))
    low = {n for n in made.forward if type_of(n.outputs[0]).dtype == DType.BFLOAT16}
    for node in made.forward:
        path = node.metadata_props.get("module", "")
        inside = {
            "*.attn": ".attn" in path and node.op_type in ("Gemm", "FlashAttention"),
            "Gemm": node.op_type == "Gemm",
            "transformer.h.0": path.startswith("transformer.h.0") and node.op_type == "Gemm",
            "lm_head": path == "lm_head" and node.op_type == "Gemm",
        }[pattern]
        if inside:
            assert node not in low, (path, node.op_type)
    plain = compiled(gpt2(dropout=0.0), data, policy=BF16).forward
    whole = sum(type_of(n.outputs[0]).dtype == DType.BFLOAT16 for n in plain)
    assert 0 < len(low) < whole or pattern == "lm_head"


def test_masks_of_dropout_are_those_of_fp32() -> None:
    """Bit for bit: what is dropped in one precision is dropped in the other."""

    class Dropped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(self.a(x), 0.4).square().sum()

    torch.manual_seed(0)
    model, data = Dropped().train(), {"x": torch.randn(8, 16)}
    with torch.no_grad():
        model.a.weight.zero_()
        model.a.bias.fill_(1.0)
    (plain,), (low,) = (gradients_of(model, [data], **more) for more in ({}, {"policy": BF16}))
    kept = {"plain": plain["grad.a.bias"], "low": low["grad.a.bias"]}
    counts = [torch.round(g / (2 / 0.6**2)) for g in kept.values()]
    assert torch.equal(*counts)
    assert 0 < float(counts[0].sum()) < 8 * 16
    assert math.isclose(float(plain["loss"]), float(low["loss"]), rel_tol=0.02)


def test_a_token_batch_of_one() -> None:
    model = gpt2(dropout=0.0)
    batches = [{"input_ids": x, "labels": x} for x in (tokens(1, 2, seed) for seed in range(12))]
    assert_near(model, batches, gradients_of(model, batches, policy=BF16))
