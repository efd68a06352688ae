"""Mixed precision where rows are left out and where micro-batches add up: beside autocast, which
computes every row, and to the bit where it may be said to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from near_autocast import ROOM, assert_near
from pooling import LOSSES, POOLINGS, Tower, TwoTowers
from pooling import batch as pooled
from test_dropout import SITES, sites_of
from tiny import (
    Tensors,
    batch,
    bert,
    compiled,
    execute_packed,
    gpt2,
    gradients_of,
    packed_gradients,
    plain,
    trained,
)
from tiny_families import rms

import onward
from onward.graph.types import DType
from onward.rewrite import Policy

pytestmark = pytest.mark.usefixtures("captures_kept")
BF16 = Policy(DType.BFLOAT16)
MAKERS: dict[str, Any] = {"gpt2": gpt2, "bert": bert}


def several(lengths: tuple[int, ...] = (9, 4, 2, 6)) -> list[Tensors]:
    """Batches of the same lengths with other words."""
    first: Any = pooled(lengths)
    return [{**first, "ids": (first["ids"] * (1 + i) + 3 * i) % 50} for i in range(16)]


AUTOCAST_FAILS = ("filled with the least",)  # the least fp32 number is none of bf16


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [n for n in POOLINGS if n not in AUTOCAST_FAILS])
def test_poolings(name: str) -> None:
    """On every row."""
    model, batches = Tower(POOLINGS[name].make).train(), several()
    assert_near(model, batches, gradients_of(model, batches, policy=BF16))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", LOSSES)
def test_two_towers_pooled_by_weights(name: str) -> None:
    """On every row, and on those that are read. The rounding of a few scores is in every gradient,
    so that all are one draw of noise: they may be off by twice autocast's."""
    model, batches = TwoTowers(POOLINGS["weights @ h"].make, LOSSES[name]).train(), several()
    assert_near(model, batches, gradients_of(model, batches, policy=BF16), room=2.0)
    made = compiled(model, batches[0], policy=BF16)
    graph = made.differentiated(trained(made), made.packed(["loss"]))
    names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
    found = [execute_packed(made, graph, data, names) for data in batches]
    every = batches[0]["ids"].numel()
    assert all(0 < n < every for _, counts in found for n in counts.values())
    assert_near(model, batches, [plain(ours) for ours, _ in found], room=2.0)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_padding_holds_changes_no_bit(kind: str) -> None:
    model, data = MAKERS[kind](dropout=0.0), batch(4, 12, "right")
    other = torch.where(data["attention_mask"] == 0, data["input_ids"] * 7 % 97, data["input_ids"])
    assert not torch.equal(other, data["input_ids"])
    (ours, counts), (again, _) = (
        packed_gradients(model, {**data, "input_ids": ids}, policy=BF16)
        for ids in (data["input_ids"], other)
    )
    assert counts
    for name, x in ours.items():
        assert torch.equal(x, again[name]), name


@pytest.mark.parametrize("kind", MAKERS)
def test_masks_are_those_of_fp32_to_the_bit(kind: str) -> None:
    data = batch(4, 16, "right")
    wide, low = (sites_of(kind, data, 0.3, **more) for more in ({}, {"policy": BF16}))
    assert len(wide) == len(low) == SITES
    for site, found in wide.items():
        also = low[site]
        alive = (found["x"] != 0) & (also["x"] != 0)  # a masked probability is 0 in any case
        assert int(alive.sum()) > 1000
        assert torch.equal((found["y"] != 0)[alive], (also["y"] != 0)[alive]), site


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "clipped": {"max_grad_norm": 0.5}, "a budget": {"memory_budget": 0.5},
    "every row": {"disable": "row_demand"},
}  # fmt: skip


def changes(model: Any, parts: list[Tensors], clip: float | None, low: bool, wide: bool) -> Tensors:
    """What eager PyTorch's plain loop makes of each parameter in one update of two micro-batches,
    SGD at rate 1; wide: in fp64, low: under autocast."""
    twin = copy.deepcopy(model).to(torch.float64 if wide else torch.float32)
    for part in parts:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = twin(**part).loss / len(parts)
        loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
    return {n: -p.grad.double() for n, p in twin.named_parameters() if p.grad is not None}


@pytest.mark.sample(8)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", MAKERS)
def test_accumulated_gradients_are_as_near_as_autocast(kind: str, options: str) -> None:
    """Micro-batches with unequal numbers of labels, each a mean of its own."""
    more = OPTIONS[options]
    model = MAKERS[kind](dropout=0.0, layers=1)
    ours, theirs, exact = ([] for _ in range(3))
    for seed in (1, 2, 3, 4):
        parts = [batch(4, 12, "right", ignored=seed % 2 == i, seed=10 * seed + i) for i in (0, 1)]
        twin = copy.deepcopy(model)
        before = {n: p.detach().double().clone() for n, p in twin.named_parameters()}
        trainer = onward.Trainer(
            twin, onward.optim.SGD(lr=1.0),
            options={
                "mixed_precision": "bf16", "gradient_accumulation_steps": 2,
                "gradient_accumulation_average": "micro_batches", **more,
            },
        )  # fmt: skip
        for part in parts:
            trainer.train_step(part)
        ours.append({n: p.detach().double() - before[n] for n, p in twin.named_parameters()})
        clip = more.get("max_grad_norm")
        theirs.append(changes(model, parts, clip, low=True, wide=False))
        exact.append(changes(model, parts, clip, low=False, wide=True))
    for name in exact[0]:
        own, other = (
            rms([float((y[name] - t[name]).norm()) for y, t in zip(found, exact, strict=True)])
            for found in (ours, theirs)
        )
        size = rms([float(t[name].norm()) for t in exact])
        # a change is read off a weight that it was added to in fp32
        held = 6e-8 * float(before[name].norm())
        assert own <= ROOM * other + 1e-7 * size + held, f"{name}: {own:.3e} of {other:.3e}"
