"""The cast policy and the passes that tidy its casts."""

from __future__ import annotations

import pytest

from onward.differentiate import vjp
from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.ops import OPS
from onward.graph.types import DType, parse_type
from onward.rewrite import Policy, run
from onward.rewrite.lists import PRECISION
from onward.rewrite.precision import (
    Precision,
    cancel_casts,
    lines,
    move_casts,
    precision_of,
    write_casts,
)

BF16 = Policy(DType.BFLOAT16)
NEVER_LOW = {
    "Softmax", "LogSoftmax", "LayerNormalization", "Exp", "Log", "ReduceSum", "ReduceMean",
    "SoftmaxCrossEntropyLoss", "CrossEntropyLoss", "AdamUpdate", "SGDUpdate", "MuonUpdate",
    "BatchNormalization", "CTCLoss", "CumSum", "Pow", "Div", "Sqrt",
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
    graph.outputs = {"y": b.Neg(b.Cast(b.transpose(x, [1, 0]), to=DType.FLOAT))}
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


def written(graph: Graph, **outputs: Value) -> dict[str, str]:
    """The element types of these values after the policy's casts."""
    graph.outputs = dict(outputs)
    before = {name: type_of(value) for name, value in outputs.items()}
    write_casts(graph, BF16)
    check(graph)
    assert {name: type_of(value) for name, value in graph.outputs.items()} == before
    return {name: str(type_of(value)).partition("[")[0] for name, value in outputs.items()}


def test_a_residual_stream_stays_fp32_and_low_operands_stay_low() -> None:
    graph, b, (x, w) = graph_of(x="f32[4,8]", w="f32[8,8]")
    y = b.MatMul(x, w)
    found = written(
        graph, product=y, stream=b.Add(x, y), both=b.Add(y, y), exact=b.Mul(y, 0.5),
        rounded=b.Mul(y, 0.1), moved=b.transpose(y, [1, 0]), softmax=b.Softmax(y, axis=-1),
        again=b.MatMul(b.Softmax(y, axis=-1), w),
    )  # fmt: skip
    assert found == {
        "product": "bf16", "stream": "f32", "both": "bf16", "exact": "bf16", "rounded": "f32",
        "moved": "bf16", "softmax": "f32", "again": "bf16",
    }  # fmt: skip
    for node in graph:
        if node.op_type == "Softmax":
            assert type_of(node.inputs[0]).dtype == DType.FLOAT


def test_only_fp32_is_lowered() -> None:
    graph, b, (x, w, n) = graph_of(x="f64[4,8]", w="f64[8,8]", n="i64[4]")
    found = written(graph, y=b.MatMul(x, w), z=b.Add(n, n))
    assert found == {"y": "f64", "z": "i64"}
    assert casts(graph) == 0


def test_a_buffer_keeps_its_type() -> None:
    graph, b, (x,) = graph_of(x="f32[4,8]")
    held = graph.input("mean", parse_type("f32[4,4]"), Role.BUFFER)
    graph.state = {"next.mean": held}
    found = written(graph, **{"next.mean": b.MatMul(x, b.transpose(x, [1, 0]))})
    assert found == {"next.mean": "bf16"}
    assert type_of(graph.outputs["next.mean"]).dtype == DType.FLOAT


@pytest.mark.parametrize(("mask", "low"), [(None, "bf16"), ("b[4,4]", "bf16"), ("f32[4,4]", "f32")])
def test_attention_with_an_addend_is_fp32(mask: str | None, low: str) -> None:
    """The least fp32 number is -inf in bf16, and a row without any key would be NaN."""
    heads = dict.fromkeys("qkv", "f32[2,3,4,8]")
    graph, b, (q, k, v, *rest) = graph_of(**heads, **({} if mask is None else {"mask": mask}))
    y, *_ = b.FlashAttention(q, k, v, *rest, scale=0.5, is_causal=0)
    assert written(graph, y=y) == {"y": low}


def test_angles_stay_fp32() -> None:
    graph, b, (x, w, cos, sin) = graph_of(
        x="f32[2,3,4,8]", w="f32[8,8]", cos="f32[2,1,4,8]", sin="f32[2,1,4,8]"
    )
    y = b.Rotary(b.MatMul(x, w), cos, sin)
    assert written(graph, y=y) == {"y": "bf16"}
    [node] = [n for n in graph if n.op_type == "Rotary"]
    kinds = [type_of(v).dtype for v in node.inputs if v is not None]
    assert kinds == [DType.BFLOAT16, DType.FLOAT, DType.FLOAT]


def test_gradients_of_a_low_value_are_added_in_fp32() -> None:
    graph, b, (x, w, u) = graph_of(x="f32[4,8]", w="f32[8,8]", u="f32[8,8]")
    y = b.MatMul(x, w)
    z = b.Add(b.MatMul(y, u), b.MatMul(y, w))
    graph.outputs = {"loss": b.reduce_sum(z, [0, 1], keepdims=False)}
    write_casts(graph, BF16)
    step = vjp(graph, ["loss"], ["x", "w", "u"])
    check(step)
    backward = [n for n in list(step)[len(list(graph)) :] if n.op_type == "Add"]
    assert backward
    for node in backward:
        assert {type_of(v).dtype for v in node.inputs if v is not None} == {DType.FLOAT}
    for name in ("x", "w", "u"):
        assert type_of(step.outputs[f"grad.{name}"]).dtype == DType.FLOAT


@pytest.mark.parametrize(
    ("pattern", "first", "second"),
    [
        ("a", "f32", "bf16"), ("a.*", "bf16", "bf16"), ("?", "f32", "f32"),
        ("MatMul", "f32", "f32"),
        ("b", "bf16", "f32"), ("c", "bf16", "bf16"),
    ],
)  # fmt: skip
def test_patterns_name_modules_and_ops(pattern: str, first: str, second: str) -> None:
    graph, _, (x, w) = graph_of(x="f32[4,8]", w="f32[8,8]")
    made = {name: Builder(graph, module=name).MatMul(x, w) for name in ("a", "b")}
    graph.outputs = dict(made)
    write_casts(graph, Policy(DType.BFLOAT16, (pattern,)))
    assert [str(type_of(y)).partition("[")[0] for y in made.values()] == [first, second]
