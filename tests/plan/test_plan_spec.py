"""`conform_plan` names what is wrong with a plan: one planted fault for each rule."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from tiny import mlp

import onward
from onward.plan import MemoryRegion, Plan, conform_plan
from onward.plan.spec import ARENA, RULES


@pytest.fixture(scope="module")
def sound() -> Plan:
    trainer = onward.Trainer(mlp(), onward.optim.AdamW(), torch.nn.functional.cross_entropy)
    trainer.train_step(torch.randn(6, 8), torch.arange(6) % 5)
    assert trainer.plan is not None
    return trainer.plan


def with_an_open_stranger(plan: Plan) -> None:
    plan.open = frozenset({"planted"})


def with_a_buffer_past_the_end(plan: Plan) -> None:
    plan.buffers[arena(plan)].offset = plan.arena_bytes


def with_a_life_turned_round(plan: Plan) -> None:
    buffer = plan.buffers[arena(plan)]
    buffer.first, buffer.last = buffer.last + 1, buffer.first


def with_shared_bytes(plan: Plan) -> None:
    first = plan.buffers[arena(plan)]
    other = next(
        b for b in plan.buffers
        if b.region in ARENA and b is not first and b.first <= first.last and first.first <= b.last
    )  # fmt: skip
    other.offset = first.offset


def with_an_early_write(plan: Plan) -> None:
    owned = next(b for b in plan.buffers if b.region is MemoryRegion.USER)
    launch = plan.launches[0]
    plan.launches[0] = replace(launch, outputs=(replace(launch.outputs[0], buffer=owned.index),))


def with_a_cut_too_late(plan: Plan) -> None:
    plan.cuts = (len(plan.launches) + 1,)


def arena(plan: Plan) -> int:
    return next(i for i, b in enumerate(plan.buffers) if b.region in ARENA and b.nbytes)


PLANTED: dict[str, Callable[[Plan], None]] = {
    "sizes": with_an_open_stranger,
    "places": with_a_buffer_past_the_end,
    "lives": with_a_life_turned_round,
    "overlaps": with_shared_bytes,
    "commit": with_an_early_write,
    "cuts": with_a_cut_too_late,
}


def test_a_sound_plan_conforms(sound: Plan) -> None:
    assert sound.commit > 0
    conform_plan(sound)


@pytest.mark.parametrize(("name", "breaks"), [(name, breaks) for name, breaks, _ in RULES])
def test_each_rule_is_broken_by_a_planted_fault(
    name: str, breaks: Callable[[Plan], object], sound: Plan
) -> None:
    plan = replace(sound, launches=list(sound.launches), buffers=deepcopy(sound.buffers))
    PLANTED[name](plan)
    assert list(breaks(plan))  # type: ignore[call-overload]
    with pytest.raises(AssertionError, match="after plan, "):
        conform_plan(plan)
