"""Tables of pipeline schedules: every action once, bubbles and micro-batches in flight by their
formulae, and what is refused."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from onward.distribute.pipeline.schedules import (
    COSTS,
    SCHEDULES,
    Action,
    Part,
    Table,
    drawn,
    schedule,
    timeline,
)
from onward.errors import OnwardError

F, B, I, W = Part.FORWARD, Part.BACKWARD, Part.INPUT, Part.WEIGHT  # noqa: E741
KINDS = [(name, v) for name in SCHEDULES for v in (1, 2, 3) if v == 1 or name.startswith("Inter")]
SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (1, 2, 4, 5, 8, 16) if m % max(1, m // p) == 0]


def in_flight(actions: list[Action]) -> int:
    """The most micro-batches of which a rank has run a forward and not yet the whole backward,
    counted once for each stage."""
    now = most = 0
    for action in actions:
        now += (action.part is F) - (action.part in (B, W))
        most = max(most, now)
    return most


def idle(table: Table) -> list[Fraction]:
    """The idle share of each rank, exactly."""
    found = timeline(table)
    busy = [sum(COSTS[a.part] for a in actions) for actions in table]
    return [1 - Fraction(each, found.length) for each in busy]


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize(("name", "stages"), KINDS)
def test_each_rank_runs_each_part_of_its_stages_once(
    name: str, stages: int, ranks: int, micro_batches: int
) -> None:
    table = schedule(name, ranks, micro_batches, stages)
    parts = (F, I, W) if name == "InterleavedZeroBubble" else (F, B)
    for rank, actions in enumerate(table):
        own = range(rank, ranks * stages, ranks)
        want = {Action(part, s, m) for part in parts for s in own for m in range(micro_batches)}
        assert set(actions) == want and len(actions) == len(want)
        for part in (B, I, W):  # of each stage in the order of the micro-batches
            for stage in own:
                done = [a.micro for a in actions if (a.part, a.stage) == (part, stage)]
                assert done == sorted(done)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize(("name", "stages"), KINDS)
def test_nothing_runs_before_what_it_needs(
    name: str, stages: int, ranks: int, micro_batches: int
) -> None:
    found = timeline(schedule(name, ranks, micro_batches, stages))
    last = ranks * stages - 1
    for action, start in found.starts.items():
        part, stage, micro = action.part, action.stage, action.micro
        if part is F and stage:
            assert found.ends[Action(F, stage - 1, micro)] <= start
        if part in (B, I):
            assert found.ends[Action(F, stage, micro)] <= start
            assert stage == last or found.ends[Action(part, stage + 1, micro)] <= start
        if part is W:
            assert found.ends[Action(I, stage, micro)] <= start


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_bubble_of_one_stage_a_rank(name: str, ranks: int, micro_batches: int) -> None:
    table = schedule(name, ranks, micro_batches)
    assert idle(table) == [Fraction(ranks - 1, micro_batches + ranks - 1)] * ranks
    most = [
        micro_batches if name == "GPipe" else min(micro_batches, ranks - s) for s in range(ranks)
    ]
    assert [in_flight(actions) for actions in table] == most


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 8)])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_bubble_of_interleaved_stages(stages: int, ranks: int, micro_batches: int) -> None:
    table = schedule("Interleaved1F1B", ranks, micro_batches, stages)
    assert idle(table) == [Fraction(ranks - 1, stages * micro_batches + ranks - 1)] * ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 6), (4, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("stages", [1, 2])
def test_gradients_of_weights_fill_the_bubble(stages: int, ranks: int, micro_batches: int) -> None:
    """A third of the time is left in which ranks wait for one another, and no rank has more in
    flight than the first."""
    table = schedule("InterleavedZeroBubble", ranks, micro_batches, stages)
    work = 3 * stages * micro_batches
    assert timeline(table).length == work + ranks - 1
    most = [in_flight(actions) for actions in table]
    assert max(most) == most[0] and (stages > 1 or most[0] == min(ranks, micro_batches))


def test_a_table_as_text() -> None:
    assert drawn(schedule("1F1B", 2, 2)).splitlines() == [
        "rank 0  0F0 0F1 .   .   0B0 0B0 .   0B1 0B1",
        "rank 1  .   1F0 1B0 1B0 1F1 1B1 1B1 .   .",
    ]


def test_the_picture_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "distributed" / "pipeline.md").read_text()
    rows = [line.split("|")[0].split()[2:] for line in text.splitlines() if "| update   " in line]
    drawing = drawn(schedule("1F1B", 3, 4)).splitlines()
    want = [[cell[1:] if cell != "." else cell for cell in row.split()[2:]] for row in drawing]
    assert rows[-3:] == want


def test_what_is_refused() -> None:
    with pytest.raises(
        OnwardError, match="pipeline_schedule='ZeroBubble' is unknown; fix: one of GPipe"
    ):
        schedule("ZeroBubble", 2, 4)
    with pytest.raises(
        OnwardError, match="GPipe has one stage a rank, not 2; fix: Interleaved1F1B"
    ):
        schedule("GPipe", 2, 4, 2)
    with pytest.raises(OnwardError, match="5 do not make 2 equal rounds; fix: a multiple of 2"):
        schedule("Interleaved1F1B", 2, 5, 2)
    turned = [schedule("1F1B", 2, 2)[0], [Action(F, 1, 1), Action(B, 1, 0), Action(F, 1, 0)]]
    with pytest.raises(ValueError, match="the actions 0B0, 1B0 of a schedule wait for one another"):
        timeline(turned)
