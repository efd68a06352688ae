"""The lockstep evaluator beside another simulation of ranks in one process: torch's LocalTensor,
under DTensor's own redistributions and products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import sharded_calls as sharded
import torch
import torch.distributed as dist
from op_cases import OpCase, r
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, rank_map
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from onward.distribute import Collectives, lockstep, ranks_of
from onward.distribute.tensor.conversions import start_conversion
from onward.distribute.tensor.sharding import PARTIAL, REPLICATED, Sharding, split
from onward.distribute.tensor.ways import RankPlace, Way
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role
from onward.graph.types import DType, Type

Arrays = list[np.ndarray]
KINDS = (REPLICATED, split(0), split(1), PARTIAL)


@contextmanager
def simulated(ranks: int) -> Iterator[DeviceMesh]:
    """A mesh of simulated ranks; no process is started."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with LocalTensorMode(ranks):
            yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def placement(sharding: Sharding) -> Any:
    """DTensor's word for a sharding in one group."""
    if sharding.dim is not None:
        assert sharding.groups == 1
        return Shard(sharding.dim)
    return Partial() if sharding == PARTIAL else Replicate()


def placed(mesh: DeviceMesh, parts: Arrays, sharding: Sharding) -> DTensor:
    """A DTensor of which each rank has the given part."""
    local = rank_map(lambda rank: torch.from_numpy(parts[rank].copy()))
    return DTensor.from_local(local, mesh, [placement(sharding)], run_check=False)


def parts_of(found: DTensor, ranks: int) -> Arrays:
    """What each rank has of a DTensor."""
    local = found.to_local()
    assert isinstance(local, LocalTensor)
    return [local._local_tensors[rank].numpy() for rank in range(ranks)]


def converted(parts: Arrays, whole: Type, have: Sharding, want: Sharding) -> Arrays:
    """What each rank has after a conversion of Onward's, in lockstep."""
    ranks, graphs = len(parts), []
    meshes = ranks_of(("tp",), (ranks,))
    for mesh in meshes:
        graph = Graph()
        x = graph.input("x", whole.with_shape(parts[mesh.coordinate("tp")].shape), Role.BATCH)
        place = RankPlace("tp", ranks, mesh.coordinate("tp"), Collectives(graph, mesh), {})
        b = Builder(graph)
        graph.outputs = {"y": start_conversion(b, x, whole, have, want, place, "x")(b)}
        graphs.append(graph)
    return [found["y"] for found in lockstep(meshes, graphs, [{"x": x} for x in parts])]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("want", [REPLICATED, split(0), split(1)], ids=str)
@pytest.mark.parametrize("have", KINDS, ids=str)
def test_conversions_are_redistributions(have: Sharding, want: Sharding, ranks: int) -> None:
    x = np.arange(12.0 * 24).reshape(12, 24)  # whole numbers, whose sums are exact
    terms = [x // (rank + 2) for rank in range(ranks - 1)]
    parts = [*terms, x - sum(terms)] if have == PARTIAL else sharded.cut(x, have, ranks)
    with simulated(ranks) as mesh:
        wanted = parts_of(placed(mesh, parts, have).redistribute(mesh, [placement(want)]), ranks)
    found = converted(parts, Type(DType.DOUBLE, x.shape), have, want)
    for y, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(y, other)


def product_ways(case: OpCase, ranks: int) -> list[Way]:
    """The ways of a product that DTensor has a word for."""
    ways = sharded.ways(sharded.node_of(case.graph()), ranks)
    return [
        way for way in ways
        if all(s in KINDS for s in (*way.inputs, *way.outputs)) and PARTIAL not in way.inputs
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_products_give_what_dtensor_gives(ranks: int) -> None:
    case = OpCase("MatMul", (r(8, 16), r(16, 24)))
    ways = product_ways(case, ranks)
    assert {way.inputs for way in ways} == {
        (split(0), REPLICATED), (REPLICATED, split(1)), (split(1), split(0)),
    }  # fmt: skip
    for way in ways:
        given = list(sharded.feeds_of(case, way).values())
        inputs = [s for s in way.inputs if s is not None]
        with simulated(ranks) as mesh:
            a, b = (
                placed(mesh, sharded.cut(x, s, ranks), s)
                for x, s in zip(given, inputs, strict=True)
            )
            made = a @ b
            assert isinstance(made, DTensor)
            assert made.placements == (placement(way.outputs[0]),), way
            wanted = parts_of(made, ranks)
        for y, other in zip(sharded.run(case, way, ranks)[0], wanted, strict=True):
            np.testing.assert_allclose(y, other, rtol=1e-5, atol=1e-6, err_msg=str(way))
