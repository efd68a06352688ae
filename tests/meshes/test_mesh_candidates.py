"""The meshes that a number of ranks can make, against all sizes whose product it is."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from onward.differentiate import Recipe, UpdateGroup
from onward.errors import OnwardError
from onward.extend import OPTIMIZERS
from onward.meshes.candidates import (
    MeshLimits,
    candidate,
    candidates,
    limits_of,
    read_candidate,
)
from onward.options import TrainerOptions
from onward.train.mesh_choice import ranks_with_one_batch

Found = tuple[int, int, int, int]  # ranks along dp_replicate, dp_shard, tp; the stage


def recipe(optimizer: str = "AdamW", **more: Any) -> Recipe:
    record = OPTIMIZERS[optimizer]
    return Recipe((UpdateGroup(0, ("param.w",), record, {}),), **more)


def found(ranks: int, limits: MeshLimits) -> list[Found]:
    made = candidates(ranks, limits)
    assert all(one.ranks == ranks for one in made)
    return [
        (one.size("dp_replicate"), one.size("dp_shard"), one.size("tp"), one.zero) for one in made
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12, 16, 30])
@pytest.mark.parametrize("most_tp", [1, 2, 6])
def test_all_sizes_are_there_once(ranks: int, most_tp: int) -> None:
    every = [
        (r, s, t, zero)
        for r, s, t in product(range(1, ranks + 1), repeat=3)
        for zero in (0, 1, 2, 3)
        if r * s * t == ranks and (s > 1) == (zero > 0) and not (zero and t > 1)
        and most_tp % t == 0
    ]  # fmt: skip
    made = found(ranks, MeshLimits((1, 2, 3), most_tp))
    assert sorted(made) == sorted(every)
    assert made[0] == (ranks, 1, 1, 0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_that_is_asked_for_stays(stage: int) -> None:
    limits = limits_of(TrainerOptions(mesh="auto", zero=stage), recipe(), most_tp=4)
    made = found(4, limits)
    assert made == [(1, 4, 1, stage), (2, 2, 1, stage)]


@pytest.mark.parametrize(
    ("options", "made", "stages", "tp"),
    [
        ({}, recipe(), (1, 3), 4),
        ({}, recipe(accumulate=True), (1, 2, 3), 4),
        ({}, recipe("LAMB"), (), 4),
        ({"ema_decay": 0.9}, recipe(accumulate=True), (1, 2, 3), 4),
        ({"optimizer_state": "8bit"}, recipe(), (1, 3), 4),
        ({"adasum": True, "mesh": {"dp_replicate": 4}}, recipe(), (), 1),
    ],
    ids=["AdamW", "a window", "LAMB", "averages", "8 bits", "adasum"],
)
def test_what_options_allow(
    options: dict[str, Any], made: Recipe, stages: tuple[int, ...], tp: int
) -> None:
    """The stages and `tp` that a Trainer with these options would take by name, and no others."""
    limits = limits_of(TrainerOptions(**options), made, most_tp=4)
    assert (limits.stages, limits.most_tp) == (stages, tp)
    for one in candidates(4, limits):
        TrainerOptions(**{**options, "mesh": dict(one.sizes), "zero": one.zero})


def test_adasum_has_one_mesh() -> None:
    limits = limits_of(TrainerOptions(mesh="auto", adasum=True), recipe(), most_tp=4)
    assert found(4, limits) == [(4, 1, 1, 0)]


@pytest.mark.parametrize(
    ("batches", "ranks"),
    [("abcd", 1), ("aabb", 2), ("aaaa", 4), ("aaab", 1), ("abab", 1), ("aaaabb", 2)],
)  # fmt: skip
def test_ranks_with_one_batch_can_share_weights(batches: str, ranks: int) -> None:
    assert ranks_with_one_batch(batches) == ranks


def test_a_mesh_as_text() -> None:
    assert read_candidate("dp_replicate=2, tp=2", 0) == candidate({"dp_replicate": 2, "tp": 2})
    assert str(read_candidate("dp_shard=4", 3)) == "dp_shard=4, zero=3"
    assert read_candidate("auto", 0) is None


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=2,tp=2", "tp=two", "rows=2", "tp=-1"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(OnwardError, match=r"^mesh is .*; fix: .*dp_replicate=2,tp=2, or auto$"):
        read_candidate(text, 0)
