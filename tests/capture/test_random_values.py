"""A value of a graph is known to be random or not, in graphs as deep as models are."""

from __future__ import annotations

import pytest

from onward.capture.evaluation import _is_random
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role
from onward.graph.types import parse_type


@pytest.mark.parametrize("role", [Role.RANDOM, Role.BATCH])
def test_a_value_of_many_paths_is_walked_once(role: Role) -> None:
    graph = Graph()
    x = graph.input("x", parse_type("i64[2]"), role)
    b = Builder(graph)
    for _ in range(3000):  # 2^3000 paths
        x = b.Add(x, x)
    assert _is_random(x) == (role is Role.RANDOM)
