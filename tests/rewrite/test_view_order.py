"""Slices, Splits, Reshapes and Transposes in one order: what moves, what stays, equal bits."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value, attributes, type_of
from onward.graph.types import parse_type, product, symbol
from onward.plan.views import contiguous, view
from onward.rewrite.common_subexpression_elimination import common_subexpression_elimination
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.reshape_through_transpose import refined, reshape_through_transpose
from onward.rewrite.slices_to_split import slices_to_split
from onward.rewrite.split_first import split_first

pytestmark = pytest.mark.usefixtures("captures_kept")

B, T = symbol("B"), symbol("T")


class Made:
    """A graph of one input, compared before and after with its sizes bound."""

    def __init__(self, text: str) -> None:
        self.graph = Graph("f")
        self.x = self.graph.input("x", parse_type(text), Role.BATCH)
        self.b = Builder(self.graph, module="model")

    def out(self, *values: Value) -> None:
        self.graph.outputs = {f"o{i}": v for i, v in enumerate(values)}

    def results(self) -> dict[str, np.ndarray]:
        shape = parse_type(str(type_of(self.x).specialized({"B": 2, "T": 5}))).shape
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)  # type: ignore[arg-type]
        return evaluate(self.graph, {"x": x})

    def rewritten(self, *passes: object) -> list[int]:
        """Edits of each pass; results and types must not have changed."""
        want, types = self.results(), [type_of(v) for v in self.graph.outputs.values()]
        edits = [p(self.graph) for p in passes]  # type: ignore[operator]
        dead_code_elimination(self.graph)
        check(self.graph)
        assert [type_of(v) for v in self.graph.outputs.values()] == types
        for name, y in self.results().items():
            np.testing.assert_array_equal(y, want[name])
        return edits

    @property
    def ops(self) -> list[str]:
        return [n.op_type for n in self.graph]


# ---- slices_to_split


def test_slices_that_tile_a_dim_become_one_split_in_any_order() -> None:
    m = Made("f32[B,7]")
    m.out(m.b.slice(m.x, 1, 4, 2**31), m.b.slice(m.x, 1, 0, 1), m.b.slice(m.x, 1, 1, 4))
    assert m.rewritten(slices_to_split) == [3]
    assert m.ops == ["Split"]


def test_slices_counted_from_the_end_and_equal_ones_are_understood() -> None:
    m = Made("f32[T,8]")
    m.out(m.b.slice(m.x, 1, 0, -3), m.b.slice(m.x, 1, -3, 2**31), m.b.slice(m.x, 1, 5, 8))
    assert m.rewritten(slices_to_split) == [3]
    assert m.ops == ["Split"]
    assert m.graph.outputs["o1"] is m.graph.outputs["o2"]


def test_slices_of_a_slice_that_is_a_piece_itself() -> None:
    m = Made("f32[B,8]")
    first = m.b.slice(m.x, 1, 0, 4)
    m.out(m.b.slice(m.x, 1, 4, 8), m.b.slice(first, 1, 0, 2), m.b.slice(first, 1, 2, 4))
    assert m.rewritten(slices_to_split) == [4]
    assert m.ops == ["Split", "Split"]


@pytest.mark.parametrize("index", [np.array(1), np.array(-2), np.array([1])])
def test_gathers_of_one_index_become_pieces_of_a_split(index: np.ndarray) -> None:
    m = Made("f32[B,3,4]")
    parts = [m.b.Gather(m.x, np.array(0), axis=1), m.b.Gather(m.x, index, axis=1)]
    m.out(*parts, m.b.squeeze(m.b.slice(m.x, 1, 2, 3), [1]))
    assert m.rewritten(slices_to_split) == [3]
    assert set(m.ops) == {"Split", "Reshape", "Squeeze"}


def test_symbolic_windows_must_tile_for_every_size() -> None:
    m = Made("f32[B,6]")
    flat = m.b.reshape(m.x, (B * 6,))
    m.out(m.b.slice(flat, 0, 0, B), m.b.slice(flat, 0, B, 3 * B), m.b.slice(flat, 0, 3 * B, 6 * B))
    assert m.rewritten(slices_to_split) == [3]
    assert m.ops.count("Split") == 1


def test_slices_that_do_not_tile_stay() -> None:
    def windows(*ends: tuple[int, int]) -> Made:
        m = Made("f32[B,8]")
        m.out(*(m.b.slice(m.x, 1, start, end) for start, end in ends))
        return m

    for m in (
        windows((0, 4), (5, 8)),  # a gap
        windows((0, 4), (4, 7)),  # an end left over
        windows((1, 4), (4, 8)),
        windows((0, 4), (3, 8)),  # an overlap
        windows((0, 4), (4, 8), (0, 2)),  # tiles, and one more
        windows((0, 4), (4, 4), (4, 8)),  # an empty one
    ):
        before = m.ops
        assert m.rewritten(slices_to_split) == [0]
        assert m.ops == before
    other_dim = Made("f32[2,2]")
    other_dim.out(other_dim.b.slice(other_dim.x, 0, 0, 1), other_dim.b.slice(other_dim.x, 1, 1, 2))
    assert other_dim.rewritten(slices_to_split) == [0]
    two = Made("f32[2,2]")
    ends = [two.b.ints(n) for n in ([0, 0], [1, 2], [0, 1])]
    both = two.b.Slice(two.x, ends[0], ends[1], ends[2])  # two dims at once
    two.out(both, two.b.slice(two.x, 0, 1, 2))
    assert two.rewritten(slices_to_split) == [0]


def test_slices_of_shapes_stay() -> None:
    """Inference follows what they hold; it follows nothing through a Split."""
    m = Made("f32[B,T]")
    shape = m.b.Shape(m.x)
    m.out(m.b.slice(shape, 0, 0, 1), m.b.slice(shape, 0, 1, 2))
    assert m.rewritten(slices_to_split) == [0]


# ---- split_first


def test_a_split_moves_above_views() -> None:
    m = Made("f32[B,T,24]")
    rows = m.b.Relu(m.b.reshape(m.x, (B * T, 24)))
    packed = m.b.transpose(m.b.reshape(rows, (B, T, 3, 2, 4)), [2, 0, 3, 1, 4])  # [3,B,2,T,4]
    m.out(*m.b.Split(packed, m.b.ints([1, 2]), axis=0))
    assert m.rewritten(split_first) == [2]
    assert [n for n in m.ops if n in ("Split", "Relu")] == ["Relu", "Split"]
    split = next(n for n in m.graph if n.op_type == "Split")
    assert attributes(split)["axis"] == 1
    assert [type_of(v).shape[1] for v in split.outputs] == [8, 16]


def test_splits_that_cannot_move_stay() -> None:
    m = Made("f32[B,6,4]")
    inner = m.b.reshape(m.x, (B, 2, 3, 4))  # 3 is not the outer part of 6
    merged = m.b.reshape(m.x, (B, 24))  # a piece would cross rows of 4
    pieces = [
        m.b.Split(inner, m.b.ints([1, 2]), axis=2),
        m.b.Split(merged, m.b.ints([1, 23]), axis=1),
    ]
    outer = m.b.reshape(m.b.reshape(m.x, (B * 24,)), (4, B * 6))  # pieces of B * 6: computed sizes
    pieces.append(m.b.Split(outer, m.b.ints([1, 3]), axis=0))
    m.out(*(p for piece in pieces for p in piece))
    assert m.rewritten(split_first) == [0]


# ---- reshape_through_transpose


def test_refined_finds_what_each_dim_is_taken_apart_into() -> None:
    assert refined((6, B), (2, 3, B)) == [[0, 1], [2]]
    assert refined((6, 1, 2 * T), (2, 3, 1, T, 2)) == [[0, 1], [], [2, 3, 4]]
    assert refined((B * T, 4), (B, T, 4)) == [[0, 1], [2]]
    assert refined((1, 4), (4, 1, 1)) == [[], [0, 1, 2]]
    assert refined((0, 4), (0, 2, 2)) == [[0], [1, 2]]
    assert refined((2, 3), (6,)) is None
    assert refined((4, 6), (6, 4)) is None
    assert refined((B, T), (T, B)) is None
    assert refined((1,), (1, 1)) is None
    assert refined((5, 0), (0, 5)) is None


def test_a_reshape_that_takes_dims_apart_moves_above_the_transpose() -> None:
    m = Made("f32[B,1,6,T]")
    turned = m.b.transpose(m.b.Relu(m.x), [3, 1, 2, 0])  # [T,1,6,B]
    m.out(m.b.reshape(turned, (T, 2, 1, 3, B)), m.b.Neg(turned))
    assert m.rewritten(reshape_through_transpose) == [1]
    assert m.ops == ["Relu", "Transpose", "Reshape", "Transpose", "Neg"]


def test_heads_become_a_view_of_the_rows() -> None:
    """The way of nn.MultiheadAttention: `[T*B,E] -> [T,B*H,K] -> [B*H,T,K] -> [B,H,T,K]`."""
    m = Made("f32[T,B,6]")
    rows = m.b.Relu(m.b.reshape(m.x, (T * B, 6)))
    heads = m.b.transpose(m.b.reshape(rows, (T, product([B, 2]), 3)), [1, 0, 2])
    m.out(m.b.reshape(heads, (B, 2, T, 3)))
    assert m.rewritten(reshape_through_transpose)[0] > 0
    assert [n for n in m.ops if n not in ("Shape", "Concat")] == [
        "Reshape", "Relu", "Reshape", "Transpose",
    ]  # fmt: skip
    assert type_of(next(n for n in m.graph if n.op_type == "Transpose").inputs[0]).shape == (
        T, B, 2, 3,
    )  # fmt: skip


def test_reshapes_that_merge_stay() -> None:
    m = Made("f32[B,T,4]")
    y = m.b.Relu(m.x)
    m.out(
        m.b.reshape(m.b.transpose(y, [1, 0, 2]), (T * B, 4)),
        m.b.reshape(m.b.transpose(y, [0, 2, 1]), (B, 2, 2 * T)),
        m.b.transpose(m.b.reshape(y, (B * T, 4)), [1, 0]),
    )
    before = m.ops
    assert m.rewritten(reshape_through_transpose) == [0]
    assert m.ops == before


def test_a_transpose_that_moves_only_ones_is_a_reshape() -> None:
    m = Made("f32[B,1,T,1]")
    m.out(m.b.transpose(m.x, [1, 0, 3, 2]), m.b.transpose(m.x, [2, 1, 0, 3]))
    assert m.rewritten(reshape_through_transpose) == [1]
    assert sorted(set(m.ops) - {"Shape", "Concat"}) == ["Reshape", "Transpose"]


# ---- the three on models


class Attends(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0].square().sum()


def test_what_multihead_attention_attends_to_lies_in_the_projection() -> None:
    data = {"x": torch.randn(5, 3, 8)}
    made = tiny.compiled(Attends(batch_first=False).train(), data)
    dims = made.captured.dims(list(data.values()))
    assert dims is not None
    graph = made.forward.clone(dims)
    layouts = {v: contiguous(i, type_of(v)) for i, v in enumerate(graph.inputs)}
    for i, node in enumerate(graph):
        x = node.inputs[0] if node.inputs else None
        seen = view(node, layouts[x]) if x in layouts and x is not None else None
        for k, y in enumerate(node.outputs):
            layouts[y] = seen[k] if seen is not None else contiguous(100 + i, type_of(y))
    gemm = next(n for n in graph if n.op_type == "Gemm")
    attention = next(n for n in graph if n.op_type in ("Attention", "FlashAttention"))
    for v in attention.inputs[:3]:
        assert v is not None
        assert layouts[v].buffer == layouts[gemm.outputs[0]].buffer
    graph = made.differentiated(tiny.trained(made))
    assert not [n for n in graph if n.op_type in ("Pad", "Slice")]


@pytest.mark.sample(3)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("off", ["slices_to_split", "split_first", "reshape_through_transpose"])
def test_gradients_do_not_depend_on_the_order_of_views(off: str, batch_first: bool) -> None:
    data = {"x": torch.randn(5, 3, 8)}
    found: list[tiny.Tensors] = []
    for disable in ((), (off,)):
        made = tiny.compiled(Attends(batch_first).train(), data, disable=disable)
        graph = made.differentiated(tiny.trained(made))
        names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
        found.append(tiny.execute(made, graph, data, names))
    for name, want in found[0].items():
        torch.testing.assert_close(found[1][name], want, rtol=1e-5, atol=1e-6)


def test_equal_slices_are_one_after_cse() -> None:
    m = Made("f32[B,4]")
    m.out(*(m.b.slice(m.x, 1, i, i + 2) for i in (0, 2, 0, 2)))
    assert m.rewritten(common_subexpression_elimination, slices_to_split) == [2, 2]
    assert m.ops == ["Split"]
