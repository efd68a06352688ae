"""Exported files: valid, portable, and silent about the machine they were made on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import tiny
from op_cases import CASES, ONWARD_CASES, OpCase, cases_of
from test_ops import stock

from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.file import save, to_proto, variant
from onward.graph.graph import Graph, Role
from onward.graph.printer import graph_text
from onward.graph.types import parse_type


def gradients() -> Graph:
    """The gradients of a two-layer GPT-2 with dropout, as its capture made them."""
    made = tiny.compiled(tiny.gpt2(), tiny.batch(2, 8))
    return made.differentiated(list(made.captured.parameters))


@pytest.mark.parametrize("case", CASES + ONWARD_CASES, ids=str)
def test_every_call_exports_to_a_valid_model(case: OpCase) -> None:
    onnx.checker.check_model(to_proto(case.graph()))


def test_a_training_graph_exports_to_a_valid_model_that_names_no_path(tmp_path: Path) -> None:
    graph = gradients()
    path = tmp_path / "gradients.onnx"
    save(graph, path)
    onnx.checker.check_model(onnx.load(path))
    found = path.read_bytes()
    here = str(Path(__file__).resolve().parent).encode()
    for text in (b"/work", b"/root", b"/home", b"site-packages", here, b".py"):
        assert text not in found


def test_sizes_are_exported_by_name() -> None:
    graph = Graph("f")
    x = graph.input("x", parse_type("f32[B,T,8]"), Role.BATCH)
    b = Builder(graph)
    graph.outputs = {"y": b.reshape(x, (*x.meta["type"].shape[:2], 2, 4)), "z": b.Neg(x)}
    proto = to_proto(graph)

    def dims(value: onnx.ValueInfoProto) -> list[str | int]:
        return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]

    assert [dims(v) for v in proto.graph.input] == [["B", "T", 8]]
    assert {v.name: dims(v) for v in proto.graph.output} == {
        "y": ["B", "T", 2, 4], "z": ["B", "T", 8],
    }  # fmt: skip


def test_exporting_changes_nothing_of_the_graph() -> None:
    graph = cases_of("Attention")[0].graph()
    before = graph_text(graph)
    to_proto(graph)
    assert graph_text(graph) == before


def test_each_variant_of_an_op_is_one_function_with_its_own_name() -> None:
    graph = Graph("f")
    x = graph.input("x", parse_type("f32[2,3]"), Role.BATCH)
    seed = graph.input("seed", parse_type("i64[2]"), Role.RANDOM)
    b = Builder(graph)
    a = b.Dropout(x, seed, None, ratio=0.5, site=0, sample_dim=-1)
    c = b.Dropout(a, seed, None, ratio=0.5, site=0, sample_dim=-1)  # as the first
    d = b.Dropout(c, seed, None, ratio=0.5, site=1, sample_dim=-1)  # another site
    e = b.Dropout(b.transpose(d, [1, 0]), seed, None, ratio=0.5, site=1, sample_dim=-1)  # a type
    graph.outputs = {"y": e}
    proto = to_proto(graph)
    assert len(proto.functions) == 3
    assert len({f.name for f in proto.functions}) == 3
    assert variant(a.producer()) == variant(c.producer()) != variant(d.producer())


@pytest.mark.parametrize("again", ["input", "twice", "constant"])
def test_outputs_that_no_node_makes_of_their_own_are_exported_all_the_same(again: str) -> None:
    graph = Graph("f")
    x = graph.input("x", parse_type("f32[2]"), Role.BATCH)
    b = Builder(graph)
    y = b.Neg(x)
    other = {"input": x, "twice": y, "constant": b.const(np.array([3.0, 4.0], np.float32))}[again]
    graph.outputs = {"y": y, "x": other}
    feeds = {"x": np.array([1.0, 2.0], np.float32)}
    proto = to_proto(graph)
    onnx.checker.check_model(proto)
    first, second = stock(proto, feeds)
    np.testing.assert_array_equal(first, -feeds["x"])
    want = {"input": feeds["x"], "twice": -feeds["x"], "constant": np.array([3.0, 4.0])}[again]
    np.testing.assert_array_equal(second, want)


def test_weights_become_initializers_of_the_file(tmp_path: Path) -> None:
    graph = Graph("f")
    x = graph.input("x", parse_type("f32[2,3]"), Role.BATCH)
    w = graph.input("w", parse_type("f32[3,2]"), Role.PARAM)
    graph.outputs = {"y": Builder(graph).MatMul(x, w)}
    weights = {"w": np.arange(6, dtype=np.float32).reshape(3, 2)}
    save(graph, tmp_path / "f.onnx", weights)
    proto = onnx.load(tmp_path / "f.onnx")
    onnx.checker.check_model(proto)
    assert [v.name for v in proto.graph.input] == ["x"]
    feeds = {"x": np.ones((2, 3), np.float32)}
    np.testing.assert_array_equal(stock(proto, feeds)[0], evaluate(graph, feeds | weights)["y"])
