"""Parts of parts: stages, then along a dim, then rows; together they are the whole, and what cannot
have parts is refused."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

import pytest
import torch

import onward
from onward import shards
from onward.distribute import Mesh, ranks_of
from onward.distribute.tensor import Sharding, TensorCut
from onward.errors import OnwardError
from onward.options import TrainerOptions
from onward.shards import StageCut, shard_of
from onward.train.cut_tensors import (
    Cut,
    add_part,
    axes_of,
    chosen_of,
    described,
    is_elsewhere,
    nested,
    outer_of,
    part_of,
    row_of,
    shape_of,
    stage_of,
)
from onward.train.optim import to_torch
from onward.train.ranks import Ranks
from onward.train.torch_optimizer import TorchOptimizer
from onward.train.weight_cuts import WeightCuts

MESHES = ranks_of(("dp_shard", "pp", "tp"), (2, 2, 2))
SHAPE = (5, 6)


def cut_at(mesh: Mesh, stages: tuple[int, ...] | None, sharding: Sharding | None) -> Cut:
    """The part of a tensor that a rank has by stages, along tp, and as rows."""
    stage = None if stages is None else StageCut("pp", 2, mesh.coordinate("pp"), stages)
    along = None if sharding is None else TensorCut("tp", 2, mesh.coordinate("tp"), sharding)
    local = SHAPE if along is None else shape_of(along, SHAPE)
    elements = torch.Size(local).numel()
    found = nested(stage, along, shard_of(elements, "dp_shard", 2, mesh.coordinate("dp_shard")))
    assert found is not None
    return found


@pytest.mark.parametrize("stages", [None, (0,), (1,), (0, 3)])
@pytest.mark.parametrize("sharding", [None, Sharding(0), Sharding(1, 3)])
def test_parts_make_up_the_whole(
    stages: tuple[int, ...] | None, sharding: Sharding | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of one stage have each element once; those that do not hold it have nothing."""
    monkeypatch.setattr(shards, "LEAST", 4)
    whole = torch.arange(1.0, 31.0).view(SHAPE)
    holders = (0, 1) if stages is None else sorted({s % 2 for s in stages})
    for place in (0, 1):
        total = torch.zeros(SHAPE)
        for mesh in (m for m in MESHES if m.coordinate("pp") == place):
            cut = cut_at(mesh, stages, sharding)
            part = part_of(cut, whole)
            assert part.shape == shape_of(cut, SHAPE) and is_elsewhere(cut) == (
                place not in holders
            )
            if sharding is not None or not mesh.coordinate("tp"):
                add_part(total, described(cut), part)
            number = torch.tensor(3.0)
            assert part_of(cut, number).numel() == (place in holders)
        assert torch.equal(total, whole if place in holders else torch.zeros(SHAPE))


def test_levels_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST", 4)
    for stages, sharding in product((None, (0,)), (None, Sharding(0))):
        cut = cut_at(MESHES[0], stages, sharding)
        row, outer, stage = row_of(cut), outer_of(cut), stage_of(cut)
        assert row is not None and row.axis == "dp_shard"
        assert (outer is None) == (sharding is None) and (stage is None) == (stages is None)
        want = {"dp_shard"} | ({"tp"} if sharding else set()) | ({"pp"} if stages else set())
        assert axes_of(cut) == want
        chosen = chosen_of(cut)
        assert nested(chosen, row) == cut and row_of(chosen) is None
        assert (chosen is None) == (not stages and not sharding)


def nothing_chosen(kinds: Collection[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    return {kind: {} for kind in kinds}


def test_an_update_that_reads_all_of_a_parameter() -> None:
    """Beside tp and pp such an optimizer is refused, with pp alone it is not."""
    options, model = TrainerOptions(), torch.nn.Linear(4, 4)
    for axes, is_refused in ((("pp", "tp"), True), (("pp",), False)):
        ranks = Ranks(options)
        ranks.mesh = Mesh(axes, (2,) * len(axes), (0,) * len(axes))
        cuts = WeightCuts(model, ranks, options)
        made = to_torch(onward.optim.LAMB(), model)
        held = TorchOptimizer(model, made, mesh=ranks.mesh)
        if is_refused:
            with pytest.raises(OnwardError, match=r"LAMB reads all of a parameter.*; fix: pp"):
                cuts.make(held, nothing_chosen)
        else:
            cuts.make(held, nothing_chosen)
