"""Sums of an open window on the ranks of pipelines, beside other axes: whatever mesh goes on, their
total is that of the ranks that saved. Gradients are whole numbers, so that sums are exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from bare_optimizers import bare_optimizer

from onward import shards
from onward.distribute import Mesh, ranks_of
from onward.distribute.tensor import Sharding, TensorCut
from onward.errors import OnwardError
from onward.shards import StageCut
from onward.train.checkpointing import random_part
from onward.train.cut_tensors import Cut, chosen_of, is_elsewhere, nested, part_of, row_of
from onward.train.rank_states import RankStates
from onward.train.torch_optimizer import TorchOptimizer

SHAPES = {"table": (6, 4), "fused": (4, 6), "small": (3,)}
STAGES = {"table": (0, 1), "fused": (1,), "small": (0,)}  # the table is tied


@dataclass(frozen=True)
class Setup:
    """A mesh, the stage of ZeRO, and the cuts along tp by parameter."""

    sizes: dict[str, int]
    zero: int = 0
    cuts: dict[str, Sharding] = field(default_factory=dict)

    @property
    def meshes(self) -> list[Mesh]:
        return ranks_of(tuple(self.sizes), tuple(self.sizes.values()))


ALONG = {"table": Sharding(0), "fused": Sharding(1, 3)}
SETUPS = [
    Setup({}),
    Setup({"dp_shard": 2}, 2),
    Setup({"pp": 2}),
    Setup({"dp_replicate": 2, "pp": 2}),
    Setup({"dp_shard": 2, "pp": 2}, 1),
    Setup({"pp": 2, "dp_shard": 2}, 2),
    Setup({"pp": 2, "tp": 2}, 0, ALONG),
    Setup({"dp_replicate": 2, "dp_shard": 2, "pp": 2}, 2),
    Setup({"dp_shard": 2, "pp": 2, "tp": 2}, 2, ALONG),
    Setup({"dp_shard": 2, "pp": 2}, 3),
    Setup({"pp": 2, "cp": 2}),
    Setup({"dp_shard": 2, "pp": 2, "cp": 2}, 3),
]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST", 4)


def held_by(setup: Setup, mesh: Mesh) -> TorchOptimizer:
    """The optimizer of one rank, with its stages and its parts along tp."""
    held, cuts = bare_optimizer(SHAPES, mesh, setup.zero), dict[torch.Tensor, Any]()
    for name, stages in STAGES.items():
        stage = StageCut("pp", 2, mesh.coordinate("pp"), stages) if "pp" in setup.sizes else None
        way = setup.cuts.get(name)
        along = None if way is None else TensorCut("tp", 2, mesh.coordinate("tp"), way)
        found = chosen_of(nested(stage, along))
        if found is not None:
            cuts[held.model.get_parameter(name)] = found
    if held.updates.state.shards.tensor_cuts is None:
        held.cut_tensors(cuts)
    return held


def summed_here(held: TorchOptimizer, name: str) -> Cut | None:
    return held.updates.state.shards.of_sums(held.model.get_parameter(name))


def holders(setup: Setup, name: str) -> tuple[int, ...]:
    return STAGES[name] if "pp" in setup.sizes else (0,)


def gradients(setup: Setup) -> list[dict[str, dict[int, np.ndarray]]]:
    """For each share of the batch and part of its positions, the gradient of each stage with a
    parameter."""
    draw = np.random.default_rng(3)
    first = setup.meshes[0]
    return [
        {
            n: {s: draw.integers(-99, 99, shape).astype(np.float32) for s in holders(setup, n)}
            for n, shape in SHAPES.items()
        }
        for _ in range(first.batches * first.size("cp"))
    ]


def saved_by(setup: Setup) -> dict[str, Any]:
    """A checkpoint within a window."""
    drawn, own, state = gradients(setup), list[Any](), dict[str, Any]()
    for mesh in setup.meshes:
        held, sums = held_by(setup, mesh), dict[str, Any]()
        for name, shape in SHAPES.items():
            cut = summed_here(held, name)
            if is_elsewhere(cut):
                continue
            is_row = row_of(cut) is not None  # rows are summed over all samples and positions
            number = mesh.share * mesh.size("cp") + mesh.coordinate("cp")
            given = drawn if is_row else [drawn[number]]
            total = np.sum([each[name][mesh.coordinate("pp")] for each in given], 0)
            whole = torch.from_numpy(total.reshape(shape))
            sums[f"accumulator.{name}"] = (whole if cut is None else part_of(cut, whole)).clone()
        torch.manual_seed(mesh.rank)
        made = {
            **random_part().save(), "registered": [], "optimizer": sums, "micro_steps": 1,
            "window_by_labels": True, "updates": 4,
        }  # fmt: skip
        state = RankStates(mesh, held).of_all(made)
        own += state.get("ranks", [])
    return state | ({"ranks": own} if own else {})


def total_of(setup: Setup, found: list[Mapping[str, Any]], name: str) -> np.ndarray:
    """What the ranks of a mesh add up to."""
    size = int(np.prod(SHAPES[name]))
    numbers = torch.arange(float(size)).view(SHAPES[name])
    total = np.zeros(size)
    for mesh, state in zip(setup.meshes, found, strict=True):
        cut, key = summed_here(held_by(setup, mesh), name), f"accumulator.{name}"
        assert (key in state["optimizer"]) != is_elsewhere(cut)
        if is_elsewhere(cut):
            continue
        sums = state["optimizer"][key]
        index = numbers if cut is None else part_of(cut, numbers)
        assert sums.shape == index.shape
        is_again = (mesh.coordinate("tp") and name not in setup.cuts) or (
            (mesh.coordinate("dp_replicate") or mesh.coordinate("cp")) and row_of(cut) is not None
        )
        if not is_again:
            np.add.at(total, index.numpy().astype(int), sums.numpy())
    return total.reshape(SHAPES[name])


@pytest.mark.parametrize("before", SETUPS, ids=str)
def test_sums_keep_their_total(before: Setup) -> None:
    state, drawn = saved_by(before), gradients(before)
    for after in SETUPS:
        found = [RankStates(m, held_by(after, m)).own_of(state) for m in after.meshes]
        for name in SHAPES:
            want = sum(np.sum(list(each[name].values()), 0) for each in drawn)
            np.testing.assert_array_equal(total_of(after, found, name), want, err_msg=str(after))


@pytest.mark.parametrize("setup", [s for s in SETUPS if "pp" in s.sizes], ids=str)
def test_sums_that_come_before_the_stages_are_chosen(setup: Setup) -> None:
    """Total sums go to the first rank with a parameter; where sums would be cut as rows too, they
    are refused."""
    state, [drawn] = saved_by(SETUPS[0]), gradients(SETUPS[0])
    found: list[Mapping[str, Any]] = []
    for mesh in setup.meshes:
        held = bare_optimizer(SHAPES, mesh, setup.zero)
        if setup.zero > 1:
            with pytest.raises(OnwardError, match="choose its cuts along tp or its stages"):
                RankStates(mesh, held).own_of(state)
            continue
        own = RankStates(mesh, held).own_of(state)
        parameters = dict(held.model.named_parameters())
        for name, p in parameters.items():
            held.updates.total(p).copy_(own["optimizer"][f"accumulator.{name}"])
        other = held_by(setup, mesh)
        cuts = {
            parameters[n]: cut
            for n, q in other.model.named_parameters()
            if (cut := other.updates.state.shards.of_weights(q)) is not None
        }
        held.cut_tensors(cuts)  # type: ignore[arg-type]
        sums = {
            f"accumulator.{n}": held.updates.total(p)
            for n, p in parameters.items()
            if not is_elsewhere(summed_here(held, n))
        }
        found.append({"optimizer": sums})
    for name in SHAPES if found else ():
        np.testing.assert_array_equal(total_of(setup, found, name), drawn[name][0], err_msg=name)
