"""What an `onward` op means on tensors of less than f32: its f32 body between casts, on onnx's
reference evaluator to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from casts import between_casts
from op_cases import ONWARD_CASES, OpCase

from onward.differentiate.rule_table import RULES
from onward.graph.build import Builder, inline
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.types import LOW, DType, parse_type

EACH_LOW = pytest.mark.parametrize("dtype", sorted(LOW), ids=str)
EACH_CASE = pytest.mark.parametrize("case", ONWARD_CASES, ids=str)


def assert_same_bits(have: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert have.keys() == want.keys()
    for name, y in have.items():
        assert y.dtype == want[name].dtype
        assert y.shape == want[name].shape
        assert y.tobytes() == want[name].tobytes(), name


@pytest.mark.sample(3)
@EACH_LOW
@EACH_CASE
def test_a_low_call_is_the_f32_body_between_casts(case: OpCase, dtype: DType) -> None:
    """Exported as an ONNX function, and put in the place of the node."""
    low, wide = case.graph(dtype), between_casts(case, dtype)
    feeds = case.feeds(dtype)
    want = evaluate(wide, feeds)
    assert_same_bits(evaluate(low, feeds), want)
    inline(low, next(iter(low)))
    assert_same_bits(evaluate(low, feeds), want)


NORMS = {
    "AddLayerNormalization": ("f32[3,5]", "f32[3,5]", "f32[5]", "f32[5]", "i64[2]", "i64[]"),
    "AddRMSNorm": ("f32[3,5]", "f32[3,5]", "f32[5]", "i64[2]", "i64[]"),
}
DROP = {"epsilon": 2.0**-10, "ratio": 0.25, "site": 3, "sample_dim": 0}
MIXED = [(x, y) for x in (DType.FLOAT, *sorted(LOW)) for y in (None, *sorted(LOW)) if x in LOW or y]


def norm(op: str, x_type: DType, y_type: DType | None, fused: bool, attrs: dict[str, Any]) -> Graph:
    """A norm of x of a dtype with a result of another; its casts inside or around it."""
    graph = Graph(op)
    b, inputs = Builder(graph), list[Value | None]()
    for i, text in enumerate(NORMS[op]):
        type = parse_type(text)
        inputs.append(graph.input(f"x{i}", type.with_dtype(x_type) if i == 0 else type, Role.BATCH))
    if not fused:
        assert inputs[0] is not None
        inputs[0] = b.cast(inputs[0], DType.FLOAT)
    inside = {"y_type": y_type} if fused and y_type is not None else {}
    y, *rest = b.node(op, inputs, attrs | inside)  # type: ignore[misc]
    if not fused and y_type is not None:
        y = b.cast(y, y_type)
    graph.outputs = {f"y{i}": v for i, v in enumerate([y, *rest])}
    return graph


def feeds_of(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    feeds: dict[str, np.ndarray] = {}
    for value in graph.inputs:
        type = type_of(value)
        shape = tuple(int(n) for n in type.shape)  # type: ignore[arg-type]
        drawn = rng.standard_normal(shape) if type.is_floating else rng.integers(0, 99, shape)
        feeds[str(value.name)] = np.asarray(drawn).astype(type.dtype.numpy())
    return feeds


@pytest.mark.parametrize(("x_type", "y_type"), MIXED, ids=str)
@pytest.mark.parametrize("op", NORMS)
def test_a_norm_with_its_casts_inside(op: str, x_type: DType, y_type: DType | None) -> None:
    fused, apart = (norm(op, x_type, y_type, inside, DROP) for inside in (True, False))
    for a, b in zip(fused.outputs.values(), apart.outputs.values(), strict=True):
        assert type_of(a) == type_of(b)
    feeds = feeds_of(fused)
    assert_same_bits(evaluate(fused, feeds), evaluate(apart, feeds))


@pytest.mark.parametrize("ratio", [0.0, 0.25])
@pytest.mark.parametrize(("x_type", "y_type"), MIXED, ids=str)
@pytest.mark.parametrize("op", NORMS)
def test_the_gradient_of_a_norm_with_its_casts_inside(
    op: str, x_type: DType, y_type: DType | None, ratio: float
) -> None:
    """dx has x's dtype, the others that of what they belong to; the bits are those of casts."""
    made: list[dict[str, np.ndarray]] = []
    for fused in (True, False):
        graph = norm(op, x_type, y_type, fused, DROP | {"ratio": ratio})
        node = next(n for n in graph if n.op_type == op)
        b, ys = Builder(graph), list(node.outputs)
        seen = next(iter(graph.outputs.values()))
        dy = graph.input("dy", type_of(seen), Role.COTANGENT)
        dr = graph.input("dr", type_of(ys[-1]), Role.COTANGENT)
        attrs = DROP | {"ratio": ratio}
        given = [b.cast(dy, type_of(ys[0]).dtype), *[None] * (len(ys) - 2), dr]
        found = RULES[op](b, given, ys, list(node.inputs), attrs)
        (dx, dresidual, *rest) = found[:3]
        assert dx is not None and dresidual is not None
        assert type_of(dx).dtype == type_of(node.inputs[0]).dtype
        assert type_of(dresidual) == type_of(ys[-1])
        results = [b.cast(dx, x_type), dresidual, *(x for x in rest if x is not None)]
        graph.outputs = {f"d{i}": x for i, x in enumerate(results)}
        made.append(evaluate(graph, feeds_of(graph)))
    assert_same_bits(*made)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize(
    ("x", "residual", "attrs", "message"),
    [
        ("f32[3,5]", "bf16[3,5]", {}, "types differ"),
        ("bf16[3,5]", "f16[3,5]", {}, "types differ"),
        ("bf16[4,5]", "f32[3,5]", {}, "types differ"),
        ("f32[3,5]", "f32[3,5]", {"y_type": DType.INT64}, "y_type int64 is not floating"),
    ],
)  # fmt: skip
def test_types_that_no_norm_has_are_refused(
    op: str, x: str, residual: str, attrs: dict[str, Any], message: str
) -> None:
    graph = Graph()
    texts = (x, residual, *NORMS[op][2:])
    inputs = [graph.input(f"x{i}", parse_type(t), Role.BATCH) for i, t in enumerate(texts)]
    with pytest.raises(ValueError, match=message):
        Builder(graph).node(op, inputs, DROP | attrs)


def test_the_rows_of_attention_are_f32() -> None:
    graph = Graph()
    q, k, v = (graph.input(n, parse_type("bf16[2,3,5,4]"), Role.BATCH) for n in "qkv")
    y, peak, total = Builder(graph).FlashAttention(q, k, v, scale=0.5, is_causal=0)
    assert [str(type_of(x)) for x in (y, peak, total)] == ["bf16[2,3,5,4]", *["f32[2,3,5]"] * 2]
