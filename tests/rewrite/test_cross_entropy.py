"""Cross-entropies that exporters and frameworks write out become SoftmaxCrossEntropyLoss, or, with
the product before them, LinearCrossEntropy; onnx's evaluator is the oracle."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from exported import numbers, rewritten

from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role
from onward.graph.types import DType, parse_type
from onward.rewrite.cross_entropy import cross_entropy

TYPES = {"z": "f32[6,5]", "label": "i64[6]"}

# each makes `r`, minus the loss of each row, f[2,3,1] or f[2,3]
ROWS = {
    "gathered": "l = LogSoftmax <axis = -1> (z) i = Unsqueeze (label, last) "
    "g = GatherElements <axis = 2> (l, i) r = Squeeze (g, last)",
    "one-hot": "l = LogSoftmax <axis = 2> (z) hot = OneHot <axis = -1> (label, depth, pair) "
    "t = Mul (hot, l) r = ReduceSum <keepdims = 0> (t, last)",
    "one-hot, kept": "l = LogSoftmax <axis = 2> (z) i = Unsqueeze (label, last) "
    "e = Equal (i, classes) hot = Cast <to = 1> (e) t = Mul (l, hot) "
    "r = ReduceSum <keepdims = 1> (t, last)",
}
SUMS = {
    "minus the sum": "s = ReduceSum <keepdims = 0> (r) loss = Neg (s)",
    "the sum of minus": "n = Neg (r) loss = ReduceSum <keepdims = 0> (n)",
    "the mean": "n = Neg (r) loss = ReduceMean <keepdims = 0> (n)",
    "flat": "n = Neg (r) f = Reshape (n, one) loss = ReduceSum <keepdims = 0> (f)",
    "over a count": "n = Neg (r) s = ReduceSum <keepdims = 0> (n) loss = Div (s, count)",
    "of rows that are seen": "n = Neg (r) c = Cast <to = 1> (seen) w = Mul (f, c) "
    "loss = ReduceSum <keepdims = 0> (w)",
}


def text(rows: str, total: str, product: str) -> str:
    shape = "2, 3, 1" if rows == "one-hot, kept" else "2, 3"
    total = SUMS[total].replace("w = Mul (f, c)", "w = Mul (n, c)")
    return (
        f"model (float[2, 3, 4] x, float[4, 5] w5, int64[2, 3] label, bool[{shape}] seen, "
        "float[2, 3, 5] z0) => (float y) <int64[1] last = {-1}, int64[1] one = {-1}, "
        "int64 depth = {5}, float[2] pair = {0.0, 1.0}, float count = {6.0}, "
        f"int64[5] classes = {{0, 1, 2, 3, 4}}> {{ {product} {ROWS[rows]} {total} "
        "y = Identity (loss) }"
    )


def feeds(rows: str, least: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shape = (2, 3, 1) if rows == "one-hot, kept" else (2, 3)
    return {
        "x": numbers(2, 3, 4), "w5": numbers(4, 5), "z0": 3 * numbers(2, 3, 5),
        "label": rng.integers(least, 5 - 2 * least, (2, 3)), "seen": rng.random(shape) < 0.6,
    }  # fmt: skip


@pytest.mark.parametrize("case", [*itertools.product(ROWS, SUMS)], ids="-".join)
def test_a_loss_of_logits(case: tuple[str, str]) -> None:
    found = rewritten(text(*case, "z = Identity (z0)"), feeds(case[0]))
    assert "SoftmaxCrossEntropyLoss" in found
    assert not {"LogSoftmax", "ReduceSum", "ReduceMean"} & {*found}


@pytest.mark.parametrize("case", [*itertools.product(ROWS, SUMS)], ids="-".join)
def test_a_loss_of_a_product(case: tuple[str, str]) -> None:
    found = rewritten(text(*case, "z = MatMul (x, w5)"), feeds(case[0]))
    assert "LinearCrossEntropy" in found


@pytest.mark.parametrize("total", SUMS)
def test_a_label_of_no_class_has_no_one(total: str) -> None:
    """A one-hot row of a label beyond the classes is zeros; below them, OneHot counts from the
    end."""
    given = feeds("one-hot", least=-3)
    assert given["label"].min() < 0
    assert given["label"].max() >= 5
    rewritten(text("one-hot", total, "z = Identity (z0)"), given)
    kept = feeds("one-hot, kept", least=-3)
    rewritten(text("one-hot, kept", total, "z = MatMul (x, w5)"), kept)


OTHERS = {
    "another axis": ("LogSoftmax <axis = 2>", "LogSoftmax <axis = 1>"),
    "other classes": ("{0, 1, 2, 3, 4}", "{0, 1, 2, 4, 3}"),
    "one class for all": ("int64[5] classes = {0, 1, 2, 3, 4}", "int64[1] classes = {0}"),
    "half a one": ("float[2] pair = {0.0, 1.0}", "float[2] pair = {0.0, 0.5}"),
}


@pytest.mark.parametrize(
    ("limit", "attrs", "again"), [(5, {}, False), (9, {}, True), (5, {"ignored": -100}, True)]
)
def test_labels_that_are_checked_already(limit: int, attrs: dict[str, int], again: bool) -> None:
    """Labels of no class have rows of zeros, unless a label of no class is an error."""
    graph = Graph()
    z, label = (graph.input(n, parse_type(t), Role.BATCH) for n, t in TYPES.items())
    b = Builder(graph)
    checked = b.InRange(label, b.scalar(limit, DType.INT64), what="label", **attrs)
    equal = b.Equal(b.unsqueeze(checked, [1]), b.arange(5))
    losses = b.Mul(b.cast(equal, DType.FLOAT), b.LogSoftmax(z, axis=1))
    graph.outputs["y"] = b.one("ReduceSum", [losses, b.ints([1])], {"keepdims": 0})
    given = {"z": numbers(6, 5), "label": np.array([0, 4, 2, 1, 3, -100 if attrs else limit - 1])}
    want = evaluate(graph, given)["y"]
    assert cross_entropy(graph) == 1
    found = [node.op_type for node in graph]
    assert "SoftmaxCrossEntropyLoss" in found
    assert ("Where" in found) == again
    np.testing.assert_allclose(evaluate(graph, given)["y"], want, rtol=1e-5)


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_the_losses_of_rows_keep_what_they_ignore(op_type: str, ignored: int) -> None:
    """The mean of all rows counts the ignored ones as well."""
    graph = Graph()
    z, label = (graph.input(n, parse_type(t), Role.BATCH) for n, t in TYPES.items())
    b = Builder(graph)
    rows = b.SoftmaxCrossEntropyLoss(z, label, reduction="none", ignore_index=ignored)[0]
    graph.outputs["y"] = b.one(op_type, [rows, b.ints([0])], {"keepdims": 0})
    given = {"z": numbers(6, 5), "label": np.array([0, 3, 4, 3, 1, 2])}
    given["label"][5] = -100 if ignored != 3 else 2
    want = torch.nn.functional.cross_entropy(
        torch.tensor(given["z"]), torch.tensor(given["label"]), reduction="sum",
        ignore_index=ignored,
    )  # fmt: skip
    assert cross_entropy(graph) == 1
    found = evaluate(graph, given)["y"]
    assert found == pytest.approx(want.item() / (6 if op_type == "ReduceMean" else 1), rel=1e-5)


def test_labels_that_are_no_integers_stay() -> None:
    given = text("one-hot, kept", "minus the sum", "z = Identity (z0)")
    given = given.replace(
        "i = Unsqueeze (label, last)", "u = Unsqueeze (label, last) i = Cast <to = 1> (u)"
    )
    given = given.replace(
        "int64[5] classes = {0, 1, 2, 3, 4}", "float[5] classes = {0.0, 1.0, 2.0, 3.0, 4.0}"
    )
    assert "SoftmaxCrossEntropyLoss" not in rewritten(given, feeds("one-hot, kept"))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_cross_entropy_stays(name: str) -> None:
    rows = "one-hot, kept" if "class" in name else "one-hot"
    old, new = OTHERS[name]
    given = text(rows, "minus the sum", "z = Identity (z0)")
    assert old in given
    found = rewritten(given.replace(old, new), feeds(rows))
    assert "SoftmaxCrossEntropyLoss" not in found


def test_losses_that_are_read_besides_stay_losses_of_rows() -> None:
    total = "n = Neg (r) s = ReduceSum <keepdims = 0> (n) m = ReduceMax <keepdims = 0> (n) "
    given = text("gathered", "minus the sum", "z = MatMul (x, w5)").replace(
        SUMS["minus the sum"], total + "loss = Add (s, m)"
    )
    assert rewritten(given, feeds("gathered")).count("SoftmaxCrossEntropyLoss") == 1


def test_log_probabilities_that_are_read_besides_stay() -> None:
    rows = ROWS["gathered"] + " m = ReduceMax <keepdims = 0> (l)"
    given = text("gathered", "minus the sum", "z = Identity (z0)")
    given = given.replace(ROWS["gathered"], rows).replace(
        "y = Identity (loss)", "y = Add (loss, m)"
    )
    assert "SoftmaxCrossEntropyLoss" not in rewritten(given, feeds("gathered"))
