"""Poolings in many spellings: the rows that are left, what keeps the others, eager's numbers."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from pooling import LOSSES, POOLINGS, Tower, TwoTowers, batch
from torch import nn

import onward

Batch = dict[str, Any]


def _rows(explanation: Any, module: str) -> int:
    """The rows that a module computes; -1 for all."""
    if module in explanation.whole:
        return -1
    (count,) = {s.count for s in explanation.sets if module in s.modules}
    return count


def _step_as_eager(trainer: onward.Trainer, twin: nn.Module, given: Batch) -> None:
    """One step of SGD at rate 1: the loss, and every parameter, so every gradient."""
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    have, want = trainer.train_step(**given).loss, twin(**given)
    torch.testing.assert_close(have, want.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
    if not want.isfinite():
        return  # such a step is left out
    want.backward()
    optimizer.step()
    theirs = dict(twin.named_parameters())
    for name, ours in trainer.model.named_parameters():
        torch.testing.assert_close(
            ours, theirs[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def _trainer(model: nn.Module, **options: Any) -> onward.Trainer:
    return onward.Trainer(model, onward.optim.SGD(lr=1.0), options=options)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", POOLINGS)
def test_rows_that_are_left_and_what_keeps_the_others(name: str) -> None:
    pooling, given = POOLINGS[name], batch()
    model = Tower(pooling.make)
    trainer, twin = _trainer(model), copy.deepcopy(model)
    found = trainer.explain(given)
    size, length = given["mask"].shape
    every = {size * length, -1}
    wanted = {"real": {int(given["mask"].sum())}, "first": {size}, "all": every}[pooling.rows]
    assert _rows(found, "outer") in wanted
    whys = [k.why for k in found.kept]
    assert len(whys) == len(pooling.why), whys
    for why, pattern in zip(whys, pooling.why, strict=True):
        assert re.match(pattern, why), why
    if whys:
        assert found.together > 0.2
    _step_as_eager(trainer, twin, given)
    if not whys:
        assert trainer.report()["rows"]["arithmetic_done"] < 0.8


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_between_towers_keep_no_padding(name: str) -> None:
    model = TwoTowers(POOLINGS["weights @ h"].make, LOSSES[name])
    trainer, twin, given = _trainer(model), copy.deepcopy(model), batch()
    found = trainer.explain(given)
    assert not found.kept, str(found)
    assert found.share < 0.8
    _step_as_eager(trainer, twin, given)


def _masks() -> dict[str, tuple[Batch, type]]:
    plain, one = batch(), batch((5,), 9)
    empty = batch((9, 0, 2, 6))
    empty["keys"] = empty["mask"].clone()
    empty["keys"][:, 0] = 1  # an attention over no key is another matter
    return {
        "bool": ({**plain, "mask": plain["mask"].bool()}, bool),
        "float": ({**plain, "mask": plain["mask"].float()}, float),
        "int32": ({**plain, "mask": plain["mask"].int()}, int),
        "other numbers": ({**plain, "mask": plain["mask"] * 3}, int),
        "no padding": (batch((9, 9, 9)), int),
        "one sequence": (one, int),
        "an empty sequence": (empty, int),
    }


MASKS = _masks()
SPELLED = (
    "weights @ h", "product, sum", "filled with the least", "least added", "four weights",
    "exp, masked", "max", "mean", "sequence first, weights",
)  # fmt: skip


def _fits(pooling: str, kind: type) -> bool:
    return kind is not bool or pooling not in ("sequence first, mean",)


@pytest.mark.sample(6)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", SPELLED)
def test_masks_of_many_kinds(name: str, mask: str) -> None:
    """Also where nothing is padding, and where all of a sequence is: equal weights, or NaN."""
    given, _ = MASKS[mask]
    model = Tower(POOLINGS[name].make)
    trainer, twin = _trainer(model), copy.deepcopy(model)
    _step_as_eager(trainer, twin, given)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["weights dropped", "mean", "sequence first, weights", "max"])
def test_dropout_is_the_same_with_the_pass_and_without(name: str) -> None:
    made = [Tower(POOLINGS[name].make, drop=0.3).train() for _ in range(2)]
    on, off = (
        _trainer(model, seed=3, disable=disable)
        for model, disable in zip(made, ((), ("row_demand",)), strict=True)
    )
    for _ in range(3):
        given = batch()
        have, want = on.train_step(**given).loss, off.train_step(**given).loss
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
    assert on.report()["rows"]["arithmetic_done"] < 0.8
    for ours, theirs in zip(made[0].parameters(), made[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
