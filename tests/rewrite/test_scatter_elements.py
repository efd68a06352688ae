"""ScatterND that adds as ScatterElements: the same sums, on any number of threads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onward.graph.build import Builder
from onward.graph.file import to_proto
from onward.graph.graph import Graph, Role
from onward.graph.types import parse_type
from onward.rewrite import scatter_elements

# shapes of x, of the index and of the rows, at B = 5
CASES = {
    "rows": ("f32[7,3]", "i64[B,1]", "f32[B,3]"),
    "rows of a table of rank 3": ("f32[4,2,3]", "i64[B,1]", "f32[B,2,3]"),
    "elements": ("f32[6]", "i64[B,1]", "f32[B]"),
    "pairs": ("f32[2,3,4]", "i64[B,2]", "f32[B,4]"),
    "whole index": ("f32[2,3]", "i64[B,2]", "f32[B]"),
    "a batch of indices": ("f32[5,2]", "i64[B,3,1]", "f32[B,3,2]"),
    "a size that varies": ("f32[B,2,3]", "i64[4,2]", "f32[4,3]"),
}
KINDS: dict[str, Any] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_it_adds_what_scatter_nd_does(name: str, kind: str) -> None:
    types = [parse_type(text) for text in CASES[name]]
    graph = Graph()
    x, index, rows = (graph.input(n, t, Role.BATCH) for n, t in zip("xir", types, strict=True))
    graph.output("y", Builder(graph).ScatterND(x, index, rows, reduction=kind))
    assert scatter_elements(graph) == 1
    assert not [node for node in graph if node.op_type == "ScatterND"]
    draw = np.random.default_rng(0)
    shapes = [[n if isinstance(n, int) else 5 for n in t.shape] for t in types]
    depth = shapes[1][-1]
    limits = np.array(shapes[0][:depth])
    places = draw.integers(-limits, limits, (math.prod(shapes[1][:-1]), depth))
    feeds = {
        "x": draw.standard_normal(shapes[0]).astype(np.float32),
        "i": places.reshape(shapes[1]),
        "r": draw.standard_normal(shapes[2]).astype(np.float32),
    }
    want = feeds["x"].astype(np.float64)
    KINDS[kind].at(want, tuple(places.T), feeds["r"].reshape(len(places), *shapes[0][depth:]))
    session = ort.InferenceSession(to_proto(graph).SerializeToString())
    [got] = session.run(None, feeds)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-6)


def test_no_term_is_lost_on_several_threads() -> None:
    graph = Graph()
    x = graph.input("x", parse_type("f32[3,256]"), Role.BATCH)
    index = graph.input("i", parse_type("i64[N,1]"), Role.BATCH)
    rows = graph.input("r", parse_type("f32[N,256]"), Role.BATCH)
    graph.output("y", Builder(graph).ScatterND(x, index, rows, reduction="add"))
    scatter_elements(graph)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 4
    session = ort.InferenceSession(to_proto(graph).SerializeToString(), options)
    places = np.arange(3000)[:, None] % 3
    ones = np.ones((3000, 256), np.float32)
    for _ in range(5):
        [got] = session.run(None, {"x": np.zeros((3, 256), np.float32), "i": places, "r": ones})
        np.testing.assert_array_equal(np.asarray(got), 1000.0)


def test_scatters_that_write_stay() -> None:
    graph = Graph()
    x, index, rows = (
        graph.input(n, parse_type(t), Role.BATCH)
        for n, t in (("x", "f32[7,3]"), ("i", "i64[2,1]"), ("r", "f32[2,3]"))
    )
    graph.output("y", Builder(graph).ScatterND(x, index, rows))
    assert scatter_elements(graph) == 0
