"""mesh="auto" of two processes over Gloo: both take the mesh that rank 0 has chosen, and make the
update of one process, whatever was chosen; and what is predicted on paper is the plan that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import auto_mesh_program
import pytest
import torch
from auto_mesh_program import STEPS

pytestmark = [pytest.mark.usefixtures("captures_kept"), pytest.mark.slow]
USUAL = {"dp_replicate": 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return auto_mesh_program.run(Path(tmp_path_factory.mktemp("auto")))


@pytest.mark.parametrize("name", ["plenty", "small", "unlike", "stage"])
def test_any_choice_makes_the_update_of_one_process(
    name: str, results: list[dict[str, Any]]
) -> None:
    want = auto_mesh_program.alone()
    for one in (each[name] for each in results):
        assert one["updates"] == STEPS
        for path, y in want.items():
            difference = float((one["weights"][path] - y).norm() / y.norm())
            assert difference < 1e-6, f"{path}: {difference}"
    first, second = (each[name] for each in results)
    assert (first["mesh"], first["zero"]) == (second["mesh"], second["zero"])


def test_the_usual_mesh_where_it_fits(results: list[dict[str, Any]]) -> None:
    one, other = (each["plenty"] for each in results)
    assert (one["mesh"], one["zero"], one["is cut"]) == (USUAL, 0, False)
    [line] = one["said"]
    assert line.startswith('INFO mesh="auto" is dp_replicate=2: ') and "it fits" in line
    assert other["said"] == [], "rank 0 alone says it"
    stage = results[1]["stage"]
    assert (stage["mesh"], stage["zero"]) == ({"dp_shard": 2}, 1)


@pytest.mark.parametrize("name", ["small", "unlike"])
def test_memory_of_the_smallest_rank_decides(name: str, results: list[dict[str, Any]]) -> None:
    one = results[1][name]
    assert one["mesh"] == {"dp_shard": 2} and one["zero"] == 3 and one["is cut"]
    [line] = results[0][name]["said"]
    assert line.startswith('WARNING mesh="auto" is dp_shard=2, zero=3: ')
    assert "dp_replicate=2 would need" in line


def test_a_window_is_trained_by_the_choice(results: list[dict[str, Any]]) -> None:
    """Three micro-batches are one update."""
    for one in (each["window"] for each in results):
        assert one["mesh"] == {"dp_shard": 2} and one["zero"] in (1, 2, 3) and one["updates"] == 1
    want = auto_mesh_program.alone(gradient_accumulation_steps=3)
    for path, y in want.items():
        assert torch.allclose(results[0]["window"]["weights"][path], y, rtol=1e-5, atol=1e-6), path


def test_ranks_with_one_batch_may_share_weights(results: list[dict[str, Any]]) -> None:
    """Whatever is chosen, it is said by both alike, and not refused."""
    one, other = (each["one batch"] for each in results)
    assert one["mesh"] == other["mesh"] and one["updates"] == STEPS


def test_nobody_waits_for_a_choice_that_fails(results: list[dict[str, Any]]) -> None:
    assert results[0]["failed"] == "ValueError: no prediction"
    assert results[1]["failed"].startswith("OnwardError: rank 0 could not choose a mesh; fix: ")


def test_ranks_that_do_not_choose_together_are_refused(results: list[dict[str, Any]]) -> None:
    for one in results:
        assert "chooses its mesh" in one["apart"] and "fix: " in one["apart"]


@pytest.mark.parametrize("mesh", auto_mesh_program.PLANS[2])
def test_the_plan_on_paper_is_the_plan_that_runs(mesh: str, results: list[dict[str, Any]]) -> None:
    """Both ranks are compared where they have other layers."""
    for each in results if "pp" in mesh else results[:1]:
        ran, paper = each["plans"][mesh]
        assert paper == ran


def test_plans_on_paper_of_four_ranks_are_those_that_run(tmp_path: Path) -> None:
    [first, *_] = auto_mesh_program.run(tmp_path, 4)
    assert first["plans"].keys() == auto_mesh_program.PLANS[4].keys()
    odd = {name: pair for name, pair in first["plans"].items() if pair[0] != pair[1]}
    assert not odd
