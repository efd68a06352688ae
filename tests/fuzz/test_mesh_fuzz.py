"""The fuzzer of meshes itself: it draws every mode, finds what is planted, and its formula of
AdaSum is the paper's."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fuzz.meshes.draw import MOST, Case, case_of
from fuzz.meshes.judge import adaptive_sum, judge, judged
from fuzz.meshes.world import World

from onward.distribute.collectives import Collectives
from onward.shards import Shard

CASES = [case_of(seed) for seed in range(500)]


@pytest.fixture(autouse=True)
def nothing_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "0")


def small(fits: Callable[[Case], bool]) -> Case:
    """The first case of that form, of a tiny family and few ranks, in which nothing is found."""
    return next(
        case for case in CASES
        if not case["is_program"] and case["model"]["layers"] == 1 and case["window"] == 1
        and np.prod(list(case["sizes"].values())) <= 4 and fits(case) and judged(case).kind == "ok"
    )  # fmt: skip


def test_a_seed_says_everything() -> None:
    for seed in (0, 7, 123456789):
        assert case_of(seed) == case_of(seed) == json.loads(json.dumps(case_of(seed)))
    assert len({json.dumps(case) for case in CASES}) == len(CASES)


def test_every_mode_is_drawn() -> None:
    """Each mode alone and with others, from two ranks to sixteen."""
    counts: Counter[str] = Counter()
    for case in CASES:
        sizes = case["sizes"]
        ranks = int(np.prod(list(sizes.values())))
        assert 2 <= ranks <= MOST and len(case["rows"]) == case["window"]
        counts["+".join(sizes)] += 1
        counts[f"zero {case['zero']}"] += 1
        counts[f"ranks {ranks}"] += 1
        for name in ("adasum", "is_program", "is_packed", "skip_nonfinite"):
            counts[name] += bool(case[name])
        counts["window"] += case["window"] > 1
        counts["sequence"] += case["sequence"]
        counts["clipped"] += case["max_grad_norm"] is not None
        counts[f"cuts {case['cuts']}"] += 1
        counts[case["optimizer"]] += 1
        counts["untied"] += case["model"].get("is_tied") is False
        counts["dropout"] += bool(case["model"].get("dropout"))
    wanted = [
        "dp_replicate", "dp_shard", "tp", "dp_replicate+dp_shard", "dp_replicate+tp", "dp_shard+tp",
        "dp_replicate+dp_shard+tp", "cp", "cp+tp", "dp_replicate+cp+tp", "dp_shard+cp",
        "dp_shard+cp+tp", "sequence", "zero 1", "zero 2", "zero 3", "adasum", "ranks 2", "ranks 16",
        "is_program", "is_packed", "window", "clipped", "cuts chosen", "cuts drawn", "LAMB", "Lion",
        "untied", "dropout",
    ]  # fmt: skip
    assert {name: counts[name] for name in wanted if counts[name] < 3} == {}


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_nothing_is_found_in_what_is_right(seed: int) -> None:
    found = judge(CASES[seed])
    assert found.kind == "ok", found


def test_adaptive_sums_of_orthogonal_and_equal_gradients() -> None:
    a, b = np.array([1.0, 2.0, 0.0]), np.array([0.0, 0.0, 3.0])
    np.testing.assert_array_equal(adaptive_sum(a, b), a + b)
    np.testing.assert_array_equal(adaptive_sum(a, a), a)
    np.testing.assert_array_equal(adaptive_sum(a, 0 * a), a)


# ---- what is planted is found


pytestmark = pytest.mark.slow


def test_a_sum_that_lacks_a_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(lambda c: list(c["sizes"]) == ["dp_replicate"] and not c["adasum"])
    module: Any = sys.modules["onward.distribute.lockstep"]
    before = module._reduced
    monkeypatch.setattr(module, "_reduced", lambda xs, by: before(xs[:-1], by))
    assert judged(case).finding


def test_a_part_of_another_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(lambda c: c["zero"] >= 1 and list(c["sizes"]) == ["dp_shard"])
    start = Shard.start

    def wrong(shard: Shard) -> int:
        return max(0, start.__get__(shard) - (1 if shard.place else 0))

    monkeypatch.setattr(Shard, "start", property(wrong))
    assert judged(case).finding


def test_masks_of_other_samples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank numbers its samples from 0."""
    case = small(
        lambda c: list(c["sizes"]) == ["dp_replicate"] and c["model"]["dropout"] > 0
        and not c["adasum"] and c["model"]["kind"] != "llama"
    )  # fmt: skip
    feeds = World.feeds

    def unnumbered(self: World, graph: Any, captured: Any, data: Any, offset: int, n: int) -> Any:
        return feeds(self, graph, captured, data, 0 if graph_is_of_ranks(graph) else offset, n)

    def graph_is_of_ranks(graph: Any) -> bool:
        return any(node.op_type.endswith("Start") for node in graph)

    monkeypatch.setattr(World, "feeds", unnumbered)
    assert judged(case).finding


def test_an_exchange_along_another_axis_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(lambda c: len(c["sizes"]) == 2 and "tp" in c["sizes"] and not c["adasum"])
    before = Collectives.start
    other = {"dp_replicate": "tp", "dp_shard": "tp"}

    def wrong(self: Any, b: Any, op: str, xs: Any, axis: str, record: str, **attrs: Any) -> Any:
        is_gradient = record.startswith("gradients")
        along = other.get(axis, axis) if is_gradient else axis
        return before(self, b, op, xs, along, record, **attrs)

    monkeypatch.setattr(Collectives, "start", wrong)
    assert judged(case).finding


def test_state_that_is_not_updated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ("Adam", "AdamW", "NAdam", "RAdam", "Lion")  # that have a mean of gradients
    case = small(lambda c: c["optimizer"] in kept and c["zero"] in (1, 2))
    by_ranks = World.by_ranks

    def stale(self: World) -> Any:
        found = by_ranks(self)
        name = next(n for n in found.made if "exp_avg" in n)
        found.made[name] = found.made[name] * 0
        return found

    monkeypatch.setattr(World, "by_ranks", stale)
    assert judged(case).kind == "difference"
