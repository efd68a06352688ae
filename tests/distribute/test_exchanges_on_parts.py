"""Collectives along one axis on ranks that have parts of their operands along another: each is the
collective of the whole operands, by the lockstep evaluator on both axes and on one alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from onward.distribute import Collectives, Mesh, lockstep, number_in_order, ranks_of
from onward.distribute.tensor.conversions import Costs, DeviceRates
from onward.distribute.tensor.sharding import (
    MAX,
    PARTIAL,
    REPLICATED,
    Sharding,
    TensorCut,
    split,
)
from onward.distribute.tensor.solve import StepSharding
from onward.distribute.tensor.ways import RankPlace
from onward.distribute.tensor.write import write_rank
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.ops.collective import STARTS
from onward.graph.types import parse_type

RNG = np.random.default_rng(0)
SHAPE = (4, 4, 6)
MAXIMA = Sharding(terms=MAX)
SUM, MOST = {"reduction": "sum"}, {"reduction": "max"}
# op, attributes, what ranks along cp have of the operand, and of the result where that is as good
CASES: list[tuple[str, dict[str, Any], Sharding, Sharding]] = [
    ("AllReduceStart", SUM, split(0), split(0)),
    ("AllReduceStart", SUM, split(2, 3), split(2, 3)),
    ("AllReduceStart", {"reduction": "mean"}, split(1), split(1)),
    ("AllReduceStart", MOST, split(1), split(1)),
    ("AllReduceStart", SUM, PARTIAL, PARTIAL),
    ("AllReduceStart", {"reduction": "mean"}, PARTIAL, PARTIAL),
    ("AllReduceStart", MOST, PARTIAL, REPLICATED),  # added up first
    ("AllReduceStart", MOST, PARTIAL, PARTIAL),  # added up first too
    ("AllReduceStart", MOST, MAXIMA, MAXIMA),
    ("AllReduceStart", SUM, MAXIMA, REPLICATED),
    ("AllGatherStart", {}, split(1), split(1)),
    ("AllGatherStart", {}, split(2, 3), split(2, 3)),
    ("AllGatherStart", {}, PARTIAL, PARTIAL),
    ("AllGatherStart", {}, split(0), REPLICATED),  # gathered along both
    ("ReduceScatterStart", SUM, split(1), split(1)),
    ("ReduceScatterStart", SUM, PARTIAL, PARTIAL),
    ("ReduceScatterStart", SUM, split(0), REPLICATED),
    ("AllToAllStart", {}, split(2), split(2)),
    ("AllToAllStart", {}, PARTIAL, PARTIAL),
    ("AllToAllStart", {}, split(0), REPLICATED),
]


class GivenSharding(StepSharding):
    """The ways of a graph whose input is sharded in one way, and its output in another."""

    def __init__(self, graph: Graph, have: Sharding, want: Sharding) -> None:
        super().__init__(graph, Costs(DeviceRates(), 2, {}))
        self._have, self._want = have, want

    def input_shardings(self, cuts: Mapping[Value, Sharding]) -> dict[Value, Sharding]:
        return {self._graph.inputs[0]: self._have}

    def wanted(self, name: str, cuts: Mapping[Value, Sharding]) -> Sharding:
        return self._want


def along_tp(mesh: Mesh, op: str, attrs: dict[str, Any]) -> Graph:
    """The collective along `tp`, for a rank."""
    graph = Graph()
    x = graph.input("x", parse_type("f32[4,4,6]"), Role.BATCH)
    [y] = Collectives(graph, mesh).run(Builder(graph), op, [x], "tp", op, **attrs)
    graph.output("y", y)
    return graph


def given(x: np.ndarray, have: Sharding, at: int) -> np.ndarray:
    """What the rank at a place of two along `cp` has of x: a part, or a term."""
    if have.dim is not None:
        return TensorCut("cp", 2, at, have).part(x)
    drawn = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    if have == PARTIAL:
        return x - drawn if at else drawn
    return np.where((drawn > 0) == bool(at), x, x - np.abs(drawn))


@pytest.mark.parametrize(("op", "attrs", "have", "want"), CASES, ids=str)
def test_a_collective_on_parts_is_that_of_the_whole(
    op: str, attrs: dict[str, Any], have: Sharding, want: Sharding
) -> None:
    meshes = ranks_of(("cp", "tp"), (2, 2))
    xs = [RNG.standard_normal(SHAPE).astype(np.float32) for _ in range(2)]
    alone = ranks_of(("tp",), (2,))
    whole = lockstep(alone, [along_tp(m, op, attrs) for m in alone], [{"x": x} for x in xs])
    graphs: list[Graph] = []
    for mesh in meshes:
        source, made = along_tp(mesh, op, attrs), Graph()
        solution = GivenSharding(source, have, want).solution({})
        place = RankPlace("cp", 2, mesh.coordinate("cp"), Collectives(made, mesh), {})
        graphs.append(write_rank(source, solution, made, place))
        number_in_order(graphs[-1])
        starts = [n for n in graphs[-1] if n.op_type in STARTS]
        is_whole = want == REPLICATED or (attrs == MOST and have == PARTIAL)
        assert len(starts) == (2 if is_whole else 1)
        share = 1 if want.dim is None else 2
        assert type_of(starts[-1].inputs[0]).numel == np.prod(SHAPE) // share
    feeds = [{"x": given(xs[m.coordinate("tp")], have, m.coordinate("cp"))} for m in meshes]
    found = lockstep(meshes, graphs, feeds)
    for t in range(2):
        parts = [found[2 * c + t]["y"] for c in range(2)]
        y = parts[0]
        if want.dim is not None:
            y = TensorCut("cp", 2, 0, want).joined(parts)
        elif want.terms:
            y = np.maximum(*parts) if want == MAXIMA else parts[0] + parts[1]
        np.testing.assert_allclose(y, whole[t]["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "attrs", "have", "want"), CASES)
def test_what_is_under_way_is_not_converted(
    op: str, attrs: dict[str, Any], have: Sharding, want: Sharding
) -> None:
    """A wait takes what its start has made, so that no conversion of it is in a step's price."""
    graph = along_tp(ranks_of(("tp",), (2,))[0], op, attrs)
    solution = GivenSharding(graph, have, want).solution({})
    under_way = {y for node in graph if node.op_type in STARTS for y in node.outputs}
    assert under_way
    assert not {value for value, _ in solution.conversions} & under_way
