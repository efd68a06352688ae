"""The builder's shorthands on stock onnxruntime, at sizes known only when the graph runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ops import stock

from onward.graph.build import Builder, is_zero
from onward.graph.file import to_proto
from onward.graph.graph import Graph, Role, Value, array_of, content_of, type_of
from onward.graph.types import DType, Shape, Size, parse_type, product, substitute, symbol

B, T = symbol("B"), symbol("T")
SIZES = [{"B": 2, "T": 3}, {"B": 4, "T": 6}]


def f(text: str) -> tuple[Graph, Builder, Value]:
    graph = Graph("f")
    x = graph.input("x", parse_type(text), Role.BATCH)
    return graph, Builder(graph), x


def feed(x: Value, sizes: dict[str, int]) -> np.ndarray:
    shape = [int(n) for n in type_of(x).specialized(sizes).shape]  # type: ignore[arg-type]
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


RESHAPES: list[tuple[str, Shape]] = [
    ("f32[B,T,12]", (B * T, 12)),
    ("f32[B,T,12]", (B, T, 3, 4)),
    ("f32[B,T,12]", (B, T * 12)),
    ("f32[B,T,12]", (B * T * 12,)),
    ("f32[B,T,12]", (T, B, 12)),  # two sizes that no 0 and no single -1 can say
    ("f32[B,T,12]", (1, B, T, 12)),
    ("f32[B,T,12]", (B, 1, T, 12)),
    ("f32[B,T,12]", (B * 2, T, 6)),
    ("f32[B,T]", (B, T, 1)),
    ("f32[6,B]", (2, 3, B)),
    ("f32[B]", (B, 1)),
    ("f32[1,1]", ()),
    ("f32[0,4]", (2, 0)),
    ("f32[0,4]", (4, 0)),
    ("f32[2,0]", (0,)),
    ("f32[B,0,6]", (0, 6, B)),
    ("f32[B,0,6]", (6, B, 0)),
    ("f32[0]", (3, 0, 0)),
    ("f32[B,0]", (0, B)),
    ("f32[B,T,0]", (T, 0, B, 2)),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("text", "shape"), RESHAPES, ids=str)
def test_reshapes_to_symbolic_sizes(text: str, shape: Shape, sizes: dict[str, int]) -> None:
    graph, b, x = f(text)
    y = b.reshape(x, shape)
    assert type_of(y).shape == shape
    graph.outputs = {"y": y}
    array = feed(x, sizes)
    (have,) = stock(to_proto(graph), {"x": array})
    want = array.reshape([int(substitute(n, sizes)) for n in shape])  # type: ignore[arg-type]
    assert have.shape == want.shape
    np.testing.assert_array_equal(have, want)


def test_common_reshapes_leave_no_shape_arithmetic() -> None:
    _, b, x = f("f32[B,T,12]")
    for shape in ((B * T, 12), (B, T, 3, 4), (B, T * 12)):
        node = b.reshape(x, shape).producer()
        assert node is not None and array_of(node.inputs[1]) is not None
    assert b.reshape(x, (B, T, 12)) is x


SHAPES: list[Size] = [B, T, 3, B * T, B * T + 1, 2 * B - 1, B * B + T * 3 - 2]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_sizes_are_read_when_the_graph_runs(size: Size, sizes: dict[str, int]) -> None:
    graph, b, x = f("f32[B,T]")
    graph.outputs = {"n": b.size(size), "i": b.arange(size), "z": b.full(1.5, type_of(x))}
    assert content_of(graph.outputs["n"]) == (size,)
    assert type_of(graph.outputs["i"]).shape == (size,)
    n, i, z = stock(to_proto(graph), {"x": feed(x, sizes)})
    want = int(substitute(size, sizes))  # type: ignore[arg-type]
    assert n.tolist() == [want]
    assert i.tolist() == list(range(want))
    np.testing.assert_array_equal(z, np.full((sizes["B"], sizes["T"]), 1.5, np.float32))


def test_a_merged_size_of_an_input_is_read_off_it() -> None:
    graph = Graph("f")
    x = graph.input("x", parse_type("f32[B,T]").with_shape((B * T, 2)), Role.BATCH)
    b = Builder(graph)
    graph.outputs = {"n": b.size(B * T)}
    (n,) = stock(to_proto(graph), {"x": np.zeros((6, 2), np.float32)})
    assert n.tolist() == [6]
    assert type_of(x).shape == (product([B, T]), 2)


def test_a_size_of_no_input_is_refused() -> None:
    _, b, _ = f("f32[B]")
    with pytest.raises(ValueError, match=r"no input has a dim of size K.*K\+1"):
        b.size(symbol("K") + 1)


@given(
    st.lists(st.integers(-9, 9), min_size=1, max_size=4),
    st.lists(st.integers(-9, 9), min_size=1, max_size=4),
    st.sampled_from(["Add", "Sub", "Mul", "Div"]),
)
def test_known_integers_are_those_that_run(a: list[int], c: list[int], op: str) -> None:
    if len(a) != len(c):
        c = c[:1]
    if op == "Div":
        c = [n or 1 for n in c]
    graph = Graph("f")
    b = Builder(graph)
    y = b.node(op, [b.ints(a), b.ints(c)], {})
    assert isinstance(y, Value)
    graph.outputs = {"y": y}
    known = content_of(y)
    assert known is not None
    assert stock(to_proto(graph), {})[0].tolist() == list(known)


def test_empty_lists_of_integers_and_axes() -> None:
    graph = Graph("f")
    b = Builder(graph)
    none = b.const(np.zeros(0, np.int64))
    assert type_of(b.Add(none, none)).shape == (0,)
    x = b.const(np.ones((2, 3), np.float32))
    assert b.reduce_sum(x, [], keepdims=True) is x
    with pytest.raises(ValueError, match="no dims"):
        b.ReduceSum(x, none, noop_with_empty_axes=1)


def test_zeros_are_known_as_such() -> None:
    graph, b, x = f("f32[B,2]")
    assert is_zero(b.full(0.0, type_of(x)))
    assert is_zero(b.const(np.zeros(3)))
    assert not is_zero(b.full(1.0, type_of(x)))
    assert not is_zero(x)
    assert len(graph.inputs) == 1


def test_equal_constants_are_one_value() -> None:
    graph = Graph("f")
    b = Builder(graph)
    assert b.scalar(1.0, DType.FLOAT) is b.scalar(1.0, DType.FLOAT)
    assert b.scalar(1.0, DType.FLOAT) is not b.scalar(1.0, DType.DOUBLE)
    assert b.scalar(0.0, DType.FLOAT) is not b.scalar(-0.0, DType.FLOAT)
    assert b.ints([1]) is not b.const(np.array(1, dtype=np.int64))


@pytest.mark.parametrize(
    ("op", "types", "attrs", "message"),
    [
        ("Add", ("f32[2]", "f64[2]"), {}, "element types differ"),
        ("Add", ("f32[2]", "f32[3]"), {}, "do not broadcast"),
        ("MatMul", ("f32[2,3]", "f32[4,2]"), {}, "inner sizes differ"),
        ("MatMul", ("f32[3]", "f32[3,2]"), {}, "vectors"),
        ("Gemm", ("f32[2,3]", "f32[3,2]"), {"transB": 1}, "inner sizes differ"),
        ("Reshape", ("f32[2]", "i64[1]"), {}, "known shape"),
        ("NoSuchOp", ("f32[2]",), {}, "no record of the op NoSuchOp"),
    ],
)
def test_calls_that_do_not_fit_are_refused(
    op: str, types: tuple[str, ...], attrs: dict[str, int], message: str
) -> None:
    graph = Graph("f")
    inputs = [graph.input(f"x{i}", parse_type(t), Role.BATCH) for i, t in enumerate(types)]
    with pytest.raises(ValueError, match=message):
        Builder(graph).node(op, inputs, attrs)
    assert len(graph) == 0


def test_no_name_of_an_input_or_output_is_given_twice() -> None:
    graph = Graph("names")
    inputs = [graph.input("lr.0", parse_type("f32[2]"), Role.BATCH) for _ in range(3)]
    names = [graph.output("finite", x) for x in inputs]
    assert len({x.name for x in inputs}) == len(set(names)) == 3
    assert [graph.outputs[name] for name in names] == inputs
    again = graph.clone().input("lr.0", parse_type("f32[2]"), Role.BATCH)
    assert again.name not in {x.name for x in inputs}
