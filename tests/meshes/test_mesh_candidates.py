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

MEANS = "gradient_accumulation_average"
# ranks along dp_replicate, dp_shard, pp, cp, tp; the stage; whether positions are shared
Found = tuple[int, int, int, int, int, int, bool]


def recipe(optimizer: str = "AdamW", **more: Any) -> Recipe:
    record = OPTIMIZERS[optimizer]
    return Recipe((UpdateGroup(0, ("param.w",), record, {}),), **more)


def found(ranks: int, limits: MeshLimits) -> list[Found]:
    made = candidates(ranks, limits)
    assert all(one.ranks == ranks for one in made)
    return [
        (
            one.size("dp_replicate"), one.size("dp_shard"), one.size("pp"), one.size("cp"),
            one.size("tp"), one.zero, one.sequence,
        )
        for one in made
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12, 16, 30])
@pytest.mark.parametrize("one_batch", [1, 2, 6])
def test_all_sizes_are_there_once(ranks: int, one_batch: int) -> None:
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    every = [
        (r, s, p, c, t, zero, split)
        for r, s, p, c, t in product(sizes, repeat=5)
        if r * s * p * c * t == ranks and one_batch % (p * c * t) == 0
        for zero in (0, 1, 2, 3)
        for split in (False, True)
        if (s > 1) == (zero > 0)
        and ((t > 1 and c == 1) or not split)
    ]  # fmt: skip
    made = found(ranks, MeshLimits((1, 2, 3), one_batch))
    assert sorted(made) == sorted(every)
    assert made[0] == (ranks, 1, 1, 1, 1, 0, False)
    without = found(ranks, MeshLimits((1, 2, 3), one_batch, pipelines=False))
    assert without == [one for one in made if one[2] == 1]


def test_each_candidate_is_one_that_a_trainer_takes() -> None:
    """By its options, with its axes in an order in which ranks with one batch are neighbours."""
    order = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
    for one in candidates(16, MeshLimits((1, 2, 3), 8)):
        axes = [axis for axis, _ in one.sizes]
        assert axes == [axis for axis in order if axis in axes], one
        sizes = dict(one.sizes)
        TrainerOptions(mesh=sizes, zero=one.zero, sequence_parallel=one.sequence)
        again = read_candidate(",".join(f"{a}={n}" for a, n in one.sizes), one.zero, one.sequence)
        assert again == one


def test_positions_that_are_asked_for_are_shared_wherever_weights_are() -> None:
    options = TrainerOptions(mesh="auto", sequence_parallel=True)
    made = candidates(4, limits_of(options, recipe(), one_batch=4))
    assert made[0] == candidate({"dp_replicate": 4})
    alone = [one for one in made if one.size("tp") > 1 and one.size("cp") == 1]
    assert alone and all(one.sequence for one in alone)


def test_state_of_whole_parameters_is_not_cut_beside_weights() -> None:
    """A Trainer refuses to cut such state beside weights that are cut along tp."""
    made = candidates(8, limits_of(TrainerOptions(), recipe("LAMB"), one_batch=4))
    assert any(one.zero for one in made) and any(one.zero and one.size("cp") > 1 for one in made)
    assert not any(one.zero and one.size("tp") > 1 for one in made)
    made = candidates(8, limits_of(TrainerOptions(), recipe(), one_batch=4))
    assert any(one.zero and one.size("tp") > 1 for one in made)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_that_is_asked_for_stays(stage: int) -> None:
    limits = limits_of(TrainerOptions(mesh="auto", zero=stage), recipe(), one_batch=2)
    made = found(4, limits)
    assert made == [
        (1, 4, 1, 1, 1, stage, False), (2, 2, 1, 1, 1, stage, False),
        (1, 2, 1, 1, 2, stage, False), (1, 2, 1, 1, 2, stage, True),
        (1, 2, 1, 2, 1, stage, False), (1, 2, 2, 1, 1, stage, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "made", "stages", "tp"),
    [
        ({}, recipe(), (1, 3), 4),
        ({}, recipe(accumulate=True), (1, 2, 3), 4),
        ({}, recipe("LAMB"), (1, 3), 4),
        ({"ema_decay": 0.9}, recipe(accumulate=True), (1, 2, 3), 4),
        ({"optimizer_state": "8bit"}, recipe(), (1, 3), 4),
        ({"adasum": True, "mesh": {"dp_replicate": 4}}, recipe(), (), 1),
        ({"fetch": ("logits",)}, recipe(), (1, 3), 4),
        ({MEANS: "micro_batches"}, recipe(), (1, 3), 4),
    ],
    ids=["AdamW", "a window", "LAMB", "averages", "8 bits", "adasum", "fetch", "means"],
)
def test_what_options_allow(
    options: dict[str, Any], made: Recipe, stages: tuple[int, ...], tp: int
) -> None:
    """The stages and `tp` that a Trainer with these options would take by name, and no others."""
    limits = limits_of(TrainerOptions(**options), made, one_batch=4)
    assert (limits.zero_stages, limits.one_batch) == (stages, tp)
    for one in candidates(4, limits):
        given = {"mesh": dict(one.sizes), "zero": one.zero, "sequence_parallel": one.sequence}
        TrainerOptions(**{**options, **given})
    has_pipelines = any(one.size("pp") > 1 for one in candidates(4, limits))
    assert has_pipelines == (not options.keys() & {"fetch", "adasum", MEANS})


def test_adasum_has_one_mesh() -> None:
    limits = limits_of(TrainerOptions(mesh="auto", adasum=True), recipe(), one_batch=4)
    assert found(4, limits) == [(4, 1, 1, 1, 1, 0, False)]


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
