"""The choice among predicted meshes: by time, within memory, with a margin for the usual one."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from onward.errors import OnwardError
from onward.meshes.candidates import MeshCandidate, candidate
from onward.meshes.choice import BUILT, SHOWN, MeshChoice, chosen
from onward.meshes.prediction import MEMORY_KINDS, StepPrediction

USUAL = candidate({"dp_replicate": 8})
SHARDS = candidate({"dp_shard": 8}, 1)
WHOLE = candidate({"dp_shard": 8}, 3)
TENSOR = candidate({"tp": 8})
PAIRS = candidate({"dp_replicate": 4, "tp": 2})
HALVES = candidate({"dp_replicate": 2, "dp_shard": 4}, 1)
Said = Mapping[MeshCandidate, tuple[float, int]]  # seconds, bytes


def step(one: MeshCandidate, seconds: float, nbytes: int, built: bool = True) -> StepPrediction:
    memory = {**dict.fromkeys(MEMORY_KINDS, 0), "weights": nbytes}
    return StepPrediction(one, 4, seconds, seconds, 0.0, memory, built=built)


def choose(
    quick: Said, truth: Said | None = None, memory: float = 100.0, refused: str = ""
) -> tuple[MeshChoice, list[MeshCandidate]]:
    """The choice, and the candidates whose graphs were built, in order. truth: what graphs say,
    where it is not what counts say. refused: meshes along these axes, by their graphs."""
    built: list[MeshCandidate] = []

    def build(one: MeshCandidate) -> StepPrediction:
        built.append(one)
        if any(axis in refused.split() for axis, _ in one.sizes):
            raise OnwardError(f"a step cannot be shared along {one}; fix: none")
        return step(one, *(truth or quick)[one])

    found = chosen(
        [step(one, *said, built=False) for one, said in quick.items()], build, memory, ""
    )
    return found, built


def test_the_usual_mesh_stays_where_nothing_is_faster() -> None:
    found, built = choose({USUAL: (1.0, 50), SHARDS: (1.2, 20), TENSOR: (2.0, 10)})
    assert found.chosen.candidate == USUAL and built == [USUAL]
    assert "it fits" in found.why


@pytest.mark.parametrize(("seconds", "want"), [(0.96, USUAL), (0.94, TENSOR)])
def test_another_has_to_be_faster_by_a_margin(seconds: float, want: MeshCandidate) -> None:
    found, _ = choose({USUAL: (1.0, 50), TENSOR: (seconds, 50)})
    assert found.chosen.candidate == want


def test_graphs_decide_and_not_counts() -> None:
    quick = {USUAL: (1.0, 50), PAIRS: (0.5, 50), TENSOR: (0.6, 50)}
    truth = {USUAL: (1.0, 50), PAIRS: (1.5, 50), TENSOR: (0.8, 50)}
    found, built = choose(quick, truth)
    assert found.chosen.candidate == TENSOR and built == [USUAL, PAIRS, TENSOR]


def test_state_is_cut_for_memory_and_not_for_speed() -> None:
    quick = {USUAL: (1.0, 50), SHARDS: (0.5, 20)}
    found, built = choose(quick)
    assert found.chosen.candidate == USUAL and built == [USUAL]
    found, _ = choose(quick, memory=40.0)
    assert found.chosen.candidate == SHARDS
    asked = {SHARDS: (1.0, 50), HALVES: (0.5, 50), WHOLE: (0.1, 20)}  # zero=1 is asked for
    assert choose(asked)[0].chosen.candidate == HALVES


def test_few_graphs_are_built() -> None:
    quick = {USUAL: (1.0, 50)} | {
        candidate({"dp_replicate": n, "tp": 64 // n}): (0.9 - n / 100, 50) for n in range(1, 9)
    }
    _, built = choose(quick)
    assert len(built) == 1 + BUILT and built[1].size("dp_replicate") == 8  # the fastest first


@pytest.mark.parametrize(("nbytes", "want"), [(90, USUAL), (91, HALVES)])
def test_a_tenth_of_the_memory_is_left(nbytes: int, want: MeshCandidate) -> None:
    """The fastest of those that fit, however much slower it is."""
    quick = {USUAL: (1.0, nbytes), SHARDS: (3.0, 40), HALVES: (2.0, 60), WHOLE: (4.0, 20)}
    found, _ = choose(quick)
    assert found.chosen.candidate == want
    if want != USUAL:
        assert "would need" in found.why and str(USUAL) in found.why


def test_more_is_built_until_one_fits() -> None:
    """Counts say that the fastest fit, and graphs that they do not."""
    quick = {USUAL: (1.0, 95), SHARDS: (1.1, 80), HALVES: (1.2, 80), PAIRS: (1.3, 80),
             TENSOR: (5.0, 60), WHOLE: (6.0, 70)}  # fmt: skip
    truth = quick | dict.fromkeys((SHARDS, HALVES, PAIRS), (1.0, 95))
    found, built = choose(quick, truth)
    assert found.chosen.candidate == TENSOR and WHOLE not in built


def test_the_smallest_is_taken_where_none_fits() -> None:
    found, _ = choose({USUAL: (1.0, 950), SHARDS: (2.0, 500), WHOLE: (3.0, 300)})
    assert found.chosen.candidate == WHOLE and "none fits" in found.why


def test_what_ranks_cannot_share_is_left_out() -> None:
    quick = {USUAL: (1.0, 95), TENSOR: (0.5, 50), SHARDS: (0.8, 50)}
    found, _ = choose(quick, refused="tp")
    assert found.chosen.candidate == SHARDS
    [bad] = [one for one in found.table if one.refusal]
    assert bad.candidate == TENSOR and "cannot be shared" in bad.refusal
    assert f"{TENSOR}: a step cannot be shared" in str(found)


def test_a_step_that_no_mesh_can_share_is_refused() -> None:
    with pytest.raises(OnwardError, match=r"^a step cannot be shared along dp_replicate=8; fix"):
        choose({USUAL: (1.0, 50)}, refused="dp_replicate")


def test_a_table_of_many_meshes_shows_the_fastest_and_the_built_ones() -> None:
    quick = {USUAL: (9.0, 50)} | {
        candidate({"dp_replicate": n, "cp": 64}): (1.0 + n / 100, 500) for n in range(2, 32)
    }
    found, built = choose(quick)
    lines = str(found).splitlines()
    shown = [line for line in lines if line.startswith(("~", "*", "  ")) and "cp=64" in line]
    assert len(found.table) == 31 and len(shown) == SHOWN and built == [USUAL]
    assert "  ... and 14 more estimates" in lines
    assert sum(line.startswith("*") for line in lines) == 1, "the chosen one, though the slowest"


def test_the_table_has_each_candidate_in_the_order_of_time() -> None:
    quick = {USUAL: (1.0, 50), TENSOR: (2.0, 50), PAIRS: (0.5, 50), WHOLE: (3.0, 50)}
    found, _ = choose(quick)
    assert [one.candidate for one in found.table] == [PAIRS, USUAL, TENSOR, WHOLE]
    assert [one.built for one in found.table] == [True, True, False, False]
    shown = [line for line in str(found).splitlines() if line[:1] in "*~" and line[:1]]
    assert [line[0] for line in shown] == ["*", "~", "~"]
