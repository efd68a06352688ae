"""Mixed precision on whole models, dropout off, beside eager PyTorch under autocast.

Per tensor, the distance of loss and gradients to an fp64 run is at most 1.25 times that of
`torch.autocast`, as a root mean square over four batches. The distance of a few numbers, such as
the loss, is a draw of noise on so few batches: they may be off by twice that and a quarter
of a unit of bf16.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import (
    PADDINGS,
    Tensors,
    batch,
    bert,
    compiled,
    eager,
    gpt2,
    gradients_of,
    packed_gradients,
    tokens,
)
from tiny_families import CASES, rms

from onward.graph.graph import Graph, Node, type_of
from onward.graph.types import DType
from onward.rewrite import Policy

pytestmark = pytest.mark.usefixtures("captures_kept")
BF16 = Policy(DType.BFLOAT16)
ROOM, FEW = 1.25, 16
WIDE = {"layers": 2, "width": 256}


def autocast(model: torch.nn.Module, data: Tensors) -> Tensors:
    """Loss and gradients of eager PyTorch under autocast."""
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = twin(**data)
    loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
    loss.backward()
    found = {f"grad.{n}": p.grad for n, p in twin.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def assert_near(model: torch.nn.Module, batches: list[Tensors], ours: list[Tensors]) -> None:
    exact = [eager(model, data, torch.float64) for data in batches]
    theirs = [autocast(model, data) for data in batches]
    broken = []
    for name in exact[0]:
        truth = [e[name] for e in exact]
        own, other = (
            rms([float((y[name].double() - t).norm()) for y, t in zip(found, truth, strict=True)])
            for found in (ours, theirs)
        )
        size = rms([float(t.norm()) for t in truth])
        few = truth[0].numel() < FEW
        allowed = (2 if few else ROOM) * other + (2.0**-11 if few else 1e-7) * size
        if not own <= allowed:
            broken.append(f"{name}: {own:.3e}, allowed {allowed:.3e}")
    assert not broken, "\n".join(broken)


def shuffled(data: Tensors, seed: int) -> Tensors:
    """The same batch with other tokens; padding and what stands for it stay."""
    ids = data.get("input_ids")
    if ids is None or not seed:
        return data
    turned = (ids - 3 + 7 * seed) % 90 + 3
    return {**data, "input_ids": torch.where(ids < 3, ids, turned)}


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", CASES)
def test_families_are_as_near_as_autocast(family: str) -> None:
    make, data = CASES[family]
    torch.manual_seed(0)
    model = make().train()
    batches = [shuffled(data(), seed) for seed in range(4)]
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
    """Packed rows in mixed precision, as near as autocast on all of them."""
    model = bert(dropout=0.0, **WIDE)
    batches = [batch(4, 12, padding=padding, seed=seed, ignored=True) for seed in range(1, 5)]
    ours = [packed_gradients(model, data, policy=BF16)[0] for data in batches]
    assert_near(model, batches, ours)


def products(graph: Graph) -> list[Node]:
    return [n for n in graph if n.op_type in ("Gemm", "MatMul")]


def casts_of_parameters(graph: Graph) -> list[str]:
    return [
        n.inputs[0].name or ""
        for n in graph
        if n.op_type == "Cast" and n.inputs[0] is not None and n.inputs[0].producer() is None
    ]


@pytest.mark.parametrize("kind", WHOLE)
def test_products_are_low_and_each_weight_is_cast_once(kind: str) -> None:
    data = batch(4, 12)
    made = compiled(WHOLE[kind](dropout=0.0), data, policy=BF16)
    step = made.differentiated([n for n, _ in made.captured.parameters.items()])
    assert products(step)
    for node in products(step):
        assert type_of(node.outputs[0]).dtype == DType.BFLOAT16
    cast = casts_of_parameters(step)
    assert cast
    assert len(cast) == len(set(cast))
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
