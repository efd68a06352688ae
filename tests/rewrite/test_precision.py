"""The cast policy and the passes that tidy its casts."""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, type_of
from onward.graph.ops import OPS
from onward.graph.types import DType, parse_type
from onward.rewrite import Policy, run
from onward.rewrite.lists import PRECISION
from onward.rewrite.precision import Precision, cancel_casts, lines, move_casts, precision_of

BF16 = Policy(DType.BFLOAT16)
NEVER_LOW = {
    "Softmax", "LogSoftmax", "LayerNormalization", "Exp", "Log", "ReduceSum", "ReduceMean",
    "SoftmaxCrossEntropyLoss", "CrossEntropyLoss", "AdamUpdate", "SGDUpdate", "BatchNormalization",
    "CTCLoss", "CumSum", "Pow", "Div", "Sqrt",
}  # fmt: skip


def test_every_op_is_in_one_line_with_its_reason() -> None:
    named = [op for _, ops in lines() for op in ops]
    assert sorted(named) == sorted(OPS)
    assert all(line.reason for line, _ in lines())
    for line, ops in lines():
        assert all(precision_of(op).precision is line.precision for op in ops)


def test_what_sums_or_grows_is_fp32() -> None:
    assert all(precision_of(op).precision is Precision.FULL for op in NEVER_LOW)


def graph_of(**types: str) -> tuple[Graph, Builder, list]:
    graph = Graph("g")
    made = [graph.input(n, parse_type(t), Role.BATCH) for n, t in types.items()]
    return graph, Builder(graph), made


def casts(graph: Graph) -> int:
    return sum(n.op_type == "Cast" for n in graph)


def test_a_cast_moves_to_what_a_view_shows() -> None:
    """So that a weight that is read both ways is cast once."""
    graph, b, (x, w) = graph_of(x="f32[4,8]", w="f32[6,8]")
    low = b.Cast(x, to=DType.BFLOAT16)
    turned = b.Cast(b.transpose(w, [1, 0]), to=DType.BFLOAT16)
    y = b.MatMul(low, turned)
    z = b.MatMul(y, b.Cast(w, to=DType.BFLOAT16))
    graph.outputs = {"z": z}
    graph, _ = run(graph, PRECISION)
    assert casts(graph) == 2
    assert type_of(graph.outputs["z"]).dtype == DType.BFLOAT16


def test_casts_that_undo_each_other_go() -> None:
    graph, b, (x,) = graph_of(x="bf16[4,8]")
    wide = b.Cast(x, to=DType.FLOAT)
    graph.outputs = {"y": b.Neg(b.Cast(wide, to=DType.BFLOAT16))}
    assert cancel_casts(graph) == 1
    graph.sweep()
    assert casts(graph) == 0


def test_a_cast_that_loses_numbers_stays() -> None:
    graph, b, (x,) = graph_of(x="f32[4,8]")
    low = b.Cast(x, to=DType.BFLOAT16)
    graph.outputs = {"y": b.Neg(b.Cast(low, to=DType.FLOAT))}
    assert cancel_casts(graph) == 0
    graph, b, (x,) = graph_of(x="bf16[4,8]")  # fp16 holds not all of bf16
    other = b.Cast(x, to=DType.FLOAT16)
    graph.outputs = {"y": b.Neg(b.Cast(other, to=DType.BFLOAT16))}
    assert cancel_casts(graph) == 0


def test_a_cast_up_stays_behind_a_view() -> None:
    graph, b, (x,) = graph_of(x="bf16[4,8]")
    graph.outputs = {"y": b.Cast(b.transpose(x, [1, 0]), to=DType.FLOAT)}
    assert move_casts(graph) == 0


def test_folding_is_left_where_no_kernel_takes_the_call() -> None:
    graph, b, (x, r, scale) = graph_of(x="bf16[4,8]", r="f32[4,8]", scale="f32[8]")
    wide = b.Cast(x, to=DType.FLOAT)
    y, *_ = b.AddLayerNormalization(wide, r, scale, None, epsilon=1e-5)
    graph.outputs = {"y": b.Neg(b.Cast(y, to=DType.BFLOAT16))}
    folds = [p for p in PRECISION if p.name == "fold_casts"]
    left, (report,) = run(graph, folds, refuse=lambda _: "no")
    assert report.edits == 0
    assert len(report.misses) == 2
    taken, (report,) = run(graph, folds)
    assert report.edits == 2
    assert casts(left) == 2
    taken.sweep()
    assert casts(taken) == 0
