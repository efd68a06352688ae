"""The `onward` ops: bodies against their type rules, and on two engines that are not ours."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from op_cases import ONWARD_CASES, Given, OpCase, Real

from onward.graph.build import Builder, inline, write_body
from onward.graph.evaluate import evaluate
from onward.graph.file import to_proto
from onward.graph.graph import ONWARD, Graph, Role, attributes, type_of
from onward.graph.ops import OWN, flops
from onward.graph.types import LOW, DType, parse_type
from onward.rewrite.common_subexpression_elimination import common_subexpression_elimination

EACH = pytest.mark.parametrize("case", ONWARD_CASES, ids=str)


def stock(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Stock onnxruntime without its own rewrites."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return [np.asarray(y) for y in session.run(None, feeds)]


@EACH
@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.DOUBLE, *sorted(LOW)], ids=str)
def test_bodies_have_the_types_that_the_record_says(case: OpCase, dtype: DType) -> None:
    graph = case.graph(dtype)
    node = next(iter(graph))
    said = [type_of(y) for y in node.outputs]
    made = write_body(Builder(graph), node, node.inputs)
    assert [type_of(y) for y in made] == said


@EACH
def test_bodies_are_written_in_standard_ops_or_smaller_ones(case: OpCase) -> None:
    """Bodies inlined again and again end in standard ops alone."""
    graph = case.graph()
    for _ in range(3):
        for node in list(graph):
            if node.domain == ONWARD:
                inline(graph, node)
    assert len(graph) > 0
    assert all(node.domain == "" for node in graph)


@EACH
def test_two_engines_compute_the_same(case: OpCase) -> None:
    graph, feeds = case.graph(), case.feeds()
    have = evaluate(graph, feeds)
    for y, want in zip(have.values(), stock(to_proto(graph), feeds), strict=True):
        assert y.dtype == want.dtype
        assert y.shape == want.shape
        np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6)


@EACH
def test_a_call_equals_its_inlined_body(case: OpCase) -> None:
    called, inlined, feeds = case.graph(), case.graph(), case.feeds()
    inline(inlined, next(iter(inlined)))
    before, after = evaluate(called, feeds), evaluate(inlined, feeds)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_every_op_has_sample_calls_and_says_what_it_is() -> None:
    for name, op in OWN.items():
        assert op.name == name
        assert bool(op.cases) != op.opaque
        assert op.doc


# ---- dropout's generator


def mask(
    shape: tuple[int, ...], ratio: float = 0.3, seed: tuple[int, int] = (1, 2), offset: int = 0,
    site: int = 0, sample_dim: int = 0,
) -> np.ndarray:  # fmt: skip
    """The result of dropout on ones: the mask, scaled."""
    attrs = {"ratio": ratio, "site": site, "sample_dim": sample_dim}
    inputs = (Real(shape, 1.0, 1.0), Given(np.array(seed)), Given(np.array(offset)))
    case = OpCase("Dropout", inputs, attrs)
    return evaluate(case.graph(), case.feeds())["y0"]


@pytest.mark.parametrize("sample_dim", [-1, 0, 1])
@pytest.mark.parametrize("shape", [(4, 7, 16), (4, 7, 3, 16)], ids=str)
def test_packed_rows_keep_their_masks(shape: tuple[int, ...], sample_dim: int) -> None:
    """Rows of a batch in any order, one twice: with their coordinates the same bits."""
    places = np.array([[3, 6], [0, 0], [1, 5], [2, 2], [1, 5], [0, 1]])
    dense = mask(shape, 0.5, offset=11, sample_dim=sample_dim)
    x = Real((len(places), *shape[2:]), 1.0, 1.0)
    given = (Given(np.array((1, 2))), Given(np.array(11)), Given(places))
    case = OpCase("Dropout", (x, *given), {"ratio": 0.5, "site": 0, "sample_dim": sample_dim})
    packed = evaluate(case.graph(), case.feeds())["y0"]
    np.testing.assert_array_equal(packed, dense[places[:, 0], places[:, 1]])


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("op", ["Attention", "FlashAttention"])
def test_packed_attention_is_that_of_the_padded_batch(op: str, causal: int) -> None:
    """Rows that are not padding, all of them as keys and some as queries, with dropout."""
    rng = np.random.default_rng(0)
    batch, heads, tokens = 3, 2, 7
    real = np.array([[1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]]) > 0
    keys = np.argwhere(real)
    queries = keys[[0, 3, 4, 8]]
    dense = [rng.standard_normal((batch, heads, tokens, 4)) for _ in range(3)]

    def packed(x: np.ndarray, at: np.ndarray) -> np.ndarray:
        return x[at[:, 0], :, at[:, 1]].swapaxes(0, 1)[None]  # f[1,H,N,K]

    attrs = {"scale": 0.5, "is_causal": causal, "ratio": 0.4, "site": 2, "sample_dim": 0}
    drawn = (Given(np.array((5, 6))), Given(np.array(3)))
    mask = Given(real[:, None, None, :])
    whole = OpCase(op, (*map(Given, dense), mask, *drawn), attrs)
    some = [Given(packed(x, at)) for x, at in zip(dense, (queries, keys, keys), strict=True)]
    part = OpCase(op, (*some, None, *drawn, Given(queries), Given(keys)), attrs)
    want = evaluate(whole.graph(DType.DOUBLE), whole.feeds(DType.DOUBLE))["y0"]
    have = evaluate(part.graph(DType.DOUBLE), part.feeds(DType.DOUBLE))["y0"]
    np.testing.assert_allclose(have, packed(want, queries), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("op", ["Attention", "FlashAttention", "FlashAttentionGrad"])
@pytest.mark.parametrize(
    ("shape", "mask", "given", "message"),
    [
        ("f32[1,2,6,4]", None, "i64[5,2]", "are not the coordinates of rows of"),
        ("f32[2,2,6,4]", None, "i64[6,2]", "are not the coordinates of rows of"),
        ("f32[1,2,6,4]", "b[1,1,1,6]", "i64[6,2]", "packed rows with a mask"),
    ],
)
def test_packed_attention_refuses(
    op: str, shape: str, mask: str | None, given: str, message: str
) -> None:
    types: list[str | None] = [shape, shape, shape, mask, None, None]
    if op == "FlashAttentionGrad":
        row = shape.replace(",4]", "]")
        types = [shape, *types, shape, row, row]
    graph = Graph()
    inputs = [
        None if text is None else graph.input(f"x{i}", parse_type(text), Role.BATCH)
        for i, text in enumerate([*types, given, given])
    ]
    with pytest.raises(ValueError, match=message):
        Builder(graph).node(op, inputs, {"scale": 0.5, "is_causal": 0})


@pytest.mark.parametrize("given", ["i64[5,2]", "i64[6]", "f32[6,2]", "i64[6,R]"])
@pytest.mark.parametrize("op", ["Dropout", "AddLayerNormalization", "AddLayerNormalizationGrad"])
def test_coordinates_of_other_rows_are_refused(op: str, given: str) -> None:
    graph = Graph()
    types = {
        "Dropout": ["f32[6,8]"],
        "AddLayerNormalization": ["f32[6,8]", "f32[6,8]", "f32[8]", "f32[8]"],
        "AddLayerNormalizationGrad": [
            "f32[6,8]", "f32[6,8]", "f32[6,8]", "f32[8]", "f32[6,1]", "f32[6,1]",
        ],
    }[op]  # fmt: skip
    inputs = [
        graph.input(f"x{i}", parse_type(text), Role.BATCH)
        for i, text in enumerate([*types, "i64[2]", "i64[]", given])
    ]
    with pytest.raises(ValueError, match="are not the coordinates of the rows of f32"):
        Builder(graph).node(op, inputs, {"ratio": 0.5, "site": 0, "sample_dim": 0})


_NORMS = {
    "LayerNormalization": ["f32[6,8]", "f32[8]", "f32[8]"],
    "LayerNormalizationGrad": ["f32[6,8]", "f32[6,8]", "f32[8]", "f32[6,1]", "f32[6,1]"],
    "AddLayerNormalization": ["f32[6,8]", "f32[6,8]", "f32[8]", "f32[8]"],
    "AddLayerNormalizationGrad": [
        "f32[6,8]", "f32[6,8]", "f32[6,8]", "f32[8]", "f32[6,1]", "f32[6,1]",
    ],
    "RMSNorm": ["f32[6,8]", "f32[8]"],
    "RMSNormGrad": ["f32[6,8]", "f32[6,8]", "f32[8]"],
    "AddRMSNorm": ["f32[6,8]", "f32[6,8]", "f32[8]"],
    "AddRMSNormGrad": ["f32[6,8]", "f32[6,8]", "f32[6,8]", "f32[8]"],
}  # fmt: skip


@pytest.mark.parametrize("given", ["f32[1]", "f32[16]", "f32[1,8]", "f32[]", "f32[6,8]"])
@pytest.mark.parametrize("op", _NORMS)
def test_weights_of_a_norm_are_one_number_for_each_place(op: str, given: str) -> None:
    """Kernels read as many as a row has, and take the sizes of rows from them."""
    for i in (i for i, text in enumerate(_NORMS[op]) if text == "f32[8]"):
        graph, types = Graph(), [*_NORMS[op]]
        types[i] = given
        inputs = [
            graph.input(f"x{i}", parse_type(text), Role.BATCH) for i, text in enumerate(types)
        ]
        with pytest.raises(ValueError, match="shapes differ"):
            Builder(graph).node(op, inputs, {} if op.startswith("Layer") else {"epsilon": 1e-5})


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(50, 20, 128), (2000, 64), (4, 4, 100, 100)], ids=str)
def test_dropout_keeps_its_share_and_the_mean(ratio: float, shape: tuple[int, ...]) -> None:
    y = mask(shape, ratio)
    n = y.size
    assert n >= 100_000
    kept = (y != 0).mean()
    assert abs(kept - (1 - ratio)) < 4 * np.sqrt(ratio * (1 - ratio) / n)
    assert np.unique(y).tolist() == [0.0, np.float32(1 / (1 - ratio))]
    assert abs(y.mean() - 1) < 4 * np.sqrt(ratio / (1 - ratio) / n)


def test_every_row_and_every_feature_keeps_its_share() -> None:
    """Draws are independent of place: the counts along either dim spread as binomial counts do."""
    y = mask((500, 400), 0.5) != 0
    for counts, n in ((y.sum(0), 500), (y.sum(1), 400)):
        z = (counts - n / 2) / np.sqrt(n / 4)
        assert np.abs(z).max() < 5
        assert 0.8 < z.var() < 1.25


def _disagreement(a: np.ndarray, b: np.ndarray) -> float:
    """The share of elements on which two masks differ, in standard deviations from 1/2."""
    return abs(float(((a != 0) != (b != 0)).mean()) - 0.5) / np.sqrt(0.25 / a.size)


@pytest.mark.parametrize(
    "other",
    [
        {"site": 1}, {"site": 7}, {"seed": (1, 3)}, {"seed": (2, 2)}, {"seed": (2, 1)},
        {"offset": 1}, {"offset": 64},
    ],
    ids=str,
)  # fmt: skip
def test_masks_of_different_sites_seeds_and_samples_are_unrelated(other: dict[str, int]) -> None:
    shape = (64, 40, 50)
    first, second = mask(shape, 0.5), mask(shape, 0.5, **other)  # type: ignore[arg-type]
    assert _disagreement(first, second) < 4


def test_neighbouring_rows_and_features_are_unrelated() -> None:
    y = mask((64, 40, 50), 0.5)
    assert _disagreement(y[1:], y[:-1]) < 4
    assert _disagreement(y[:, 1:], y[:, :-1]) < 4
    assert _disagreement(y[..., 1:], y[..., :-1]) < 4


@pytest.mark.parametrize("sample_dim", [0, 1, 2])
def test_a_part_of_a_batch_draws_the_masks_of_its_samples(sample_dim: int) -> None:
    shape = [5, 5, 5, 16]
    whole = mask(tuple(shape), sample_dim=sample_dim)
    shape[sample_dim] = 2
    part = mask(tuple(shape), sample_dim=sample_dim, offset=2)
    np.testing.assert_array_equal(part, np.take(whole, [2, 3], axis=sample_dim))


def test_without_a_sample_dim_the_offset_is_not_read() -> None:
    shape = (6, 16)
    np.testing.assert_array_equal(mask(shape, sample_dim=-1), mask(shape, sample_dim=-1, offset=9))


def test_masks_do_not_depend_on_the_sizes_around_them() -> None:
    """A dropout mask draws the same bit at the same logical place in a longer sequence or wider
    batch."""
    small, large = mask((2, 5, 16)), mask((3, 9, 16))
    np.testing.assert_array_equal(small, large[:2, :5])


# ---- the arithmetic that a record counts


def products(graph: Graph) -> int:
    """Two FLOPs for each multiplication with its addition, of every product in the graph; a product
    that the body writes twice is one."""
    while fused := [n for n in graph if n.domain == ONWARD]:
        for node in fused:
            inline(graph, node)
    common_subexpression_elimination(graph)
    total = 0
    for node in graph:
        if node.op_type in ("Gemm", "MatMul"):
            a, y = type_of(node.inputs[0]).shape, type_of(node.outputs[0]).shape
            inner = a[0] if node.op_type == "Gemm" and attributes(node).get("transA") else a[-1]
            total += 2 * math.prod(int(n) for n in y) * int(inner)  # type: ignore[arg-type]
        elif node.op_type == "Conv":
            total += int(flops(node))  # type: ignore[arg-type]
    return total


@pytest.mark.parametrize("case", ONWARD_CASES, ids=str)
def test_flops_are_those_of_the_products_in_the_body(case: OpCase) -> None:
    graph = case.graph()
    node = next(iter(graph))
    ends = node.inputs[2] if case.op.startswith("Grouped") else None
    # a body multiplies each row with the matrix of every group, a kernel with its own alone
    groups = 1 if ends is None else int(type_of(ends).shape[0])  # type: ignore[arg-type]
    assert flops(node) == products(graph) // groups
