"""Passes about matrix products: addends folded in, the head joined with its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fusing import alone, fused, reasons

from onward.differentiate import vjp
from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.types import parse_type
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.gemm_add import gemm_add
from onward.rewrite.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_step

Run = Callable[[Graph, dict[str, np.ndarray]], dict[str, np.ndarray]]


class Layer:
    """`x f32[6,4]`, `w f32[5,4]` and what is made of them."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.b = Builder(self.graph)
        self.feeds: dict[str, np.ndarray] = {}
        self.x, self.w = self.given("x", "f32[6,4]"), self.given("w", "f32[5,4]")
        self.c = self.given("c", "f32[6,5]")

    def given(self, name: str, type: str) -> Value:
        value = self.graph.input(name, parse_type(type), Role.BATCH)
        shape = [int(n) for n in type_of(value).shape]  # type: ignore[arg-type]
        rng = np.random.default_rng(len(self.feeds))
        self.feeds[name] = (
            np.array([4, 1, -100, 0, 3, 2][: shape[0]])
            if type.startswith("i64")
            else rng.standard_normal(shape).astype(np.float32)
        )
        return value

    def gemm(self, **attrs: float) -> Value:
        return self.b.Gemm(self.x, self.w, transB=1, **attrs)

    def out(self, *values: Value) -> Graph:
        self.graph.outputs = {f"y{i}": v for i, v in enumerate(values)}
        return self.graph

    def same(self, graph: Graph, edit: Callable[[Graph], int], edits: int) -> None:
        """The pass makes `edits` edits and the results stay within rounding."""
        want = evaluate(graph, self.feeds)
        assert edit(graph) == edits
        for name, y in evaluate(graph, self.feeds).items():
            np.testing.assert_allclose(y, want[name], rtol=2e-6, atol=2e-6)


def ops(graph: Graph) -> list[str]:
    return [node.op_type for node in graph]


# ---- gemm_add


@pytest.mark.parametrize("side", [0, 1])
def test_an_addend_becomes_the_products(side: int) -> None:
    m = Layer()
    pair = (m.gemm(), m.c)
    graph = m.out(m.b.Add(*(pair if side == 0 else pair[::-1])))
    m.same(graph, gemm_add, 1)
    assert ops(graph) == ["Gemm"]


def test_reshapes_between_are_looked_through() -> None:
    m = Layer()
    wide = m.given("wide", "f32[2,3,5]")
    graph = m.out(m.b.Add(m.b.reshape(m.gemm(), (2, 3, 5)), wide))
    m.same(graph, gemm_add, 1)
    assert sorted(ops(graph)) == ["Gemm", "Reshape", "Reshape"]


def test_sums_of_products_become_a_chain() -> None:
    m = Layer()
    total = m.b.Add(m.b.Add(m.c, m.gemm()), m.b.Gemm(m.x, m.given("v", "f32[4,5]")))
    graph = m.out(m.b.Add(total, m.b.Gemm(m.x, m.given("u", "f32[4,5]"))))
    m.same(graph, gemm_add, 3)
    assert ops(graph) == ["Gemm"] * 3


def test_other_sums_are_left_alone() -> None:
    m = Layer()
    both, shown = m.gemm(), m.gemm()
    row = m.given("row", "f32[5]")
    graph = m.out(
        m.b.Add(both, m.c), m.b.Neg(both),  # the product has another reader
        m.b.Add(shown, m.c), shown,  # is an output
        m.b.Add(m.gemm(), row),  # a row is a bias, not a matrix
        m.b.Add(m.b.Gemm(m.x, m.w, row, transB=1), m.c),  # has an addend already
        m.b.Add(m.gemm(alpha=0.5), m.c),
        m.b.Sub(m.gemm(), m.c),
        m.b.Add(m.b.Tanh(m.gemm()), m.c),
    )  # fmt: skip
    before = ops(graph)
    m.same(graph, gemm_add, 0)
    assert ops(graph) == before


# ---- the head and its loss


def head(m: Layer, bias: bool = True, **attrs: object) -> tuple[Value, Value]:
    """Logits f32[6,5] and their loss."""
    labels = m.given("labels", "i64[6]")
    row = [m.given("bias", "f32[5]")] if bias else []
    logits = m.b.Gemm(m.x, m.w, *row, transB=1)
    loss, _ = m.b.SoftmaxCrossEntropyLoss(logits, labels, **attrs)
    return logits, loss


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_no_longer_reads_the_logits(bias: bool, reduction: str) -> None:
    m = Layer()
    logits, loss = head(m, bias, reduction=reduction, ignore_index=-100)
    graph = m.out(loss, logits)
    m.same(graph, alone(linear_cross_entropy), 1)
    del graph.outputs["y1"]
    dead_code_elimination(graph)
    assert ops(graph) == ["LinearCrossEntropy"]


def test_class_weights_come_along() -> None:
    m = Layer()
    weight = m.given("weight", "f32[5]")
    m.feeds["weight"] = np.abs(m.feeds["weight"]) + np.float32(0.1)
    labels = m.given("labels", "i64[6]")
    loss, _ = m.b.SoftmaxCrossEntropyLoss(m.gemm(), labels, weight, ignore_index=-100)
    m.same(m.out(loss), alone(linear_cross_entropy), 1)


def test_logits_in_rows_of_three_dims_are_looked_through() -> None:
    m = Layer()
    labels = m.given("labels", "i64[6]")
    wide = m.b.reshape(m.gemm(), (2, 3, 5))
    loss, _ = m.b.SoftmaxCrossEntropyLoss(m.b.reshape(wide, (6, 5)), labels, ignore_index=-100)
    m.same(m.out(loss), alone(linear_cross_entropy), 1)


def test_other_losses_are_left_alone() -> None:
    m = Layer()
    labels = m.given("labels", "i64[6]")
    graph = m.out(
        m.b.SoftmaxCrossEntropyLoss(m.gemm(), labels, reduction="none")[0],
        m.b.SoftmaxCrossEntropyLoss(m.b.Tanh(m.gemm()), labels)[0],
        m.b.SoftmaxCrossEntropyLoss(m.gemm(alpha=2.0), labels)[0],
        *m.b.SoftmaxCrossEntropyLoss(m.gemm(), labels),  # the log-probabilities are asked for
    )
    before = ops(graph)
    assert reasons(linear_cross_entropy, graph) == [
        "reduction none",  # a Tanh after the product is no near miss
        "the logits are no plain product of x and w",
        "the log-probabilities are read by other ops too",
    ]
    assert ops(graph) == before


def test_a_weight_that_is_stored_by_inputs_is_turned(execute: Run) -> None:
    m = Layer()
    labels, weight = m.given("labels", "i64[6]"), m.given("v", "f32[4,5]")
    graph = m.out(m.b.SoftmaxCrossEntropyLoss(m.b.Gemm(m.x, weight), labels, ignore_index=-100)[0])
    m.same(graph, alone(linear_cross_entropy), 1)
    dead_code_elimination(graph)
    assert sorted(ops(graph)) == ["LinearCrossEntropy", "Transpose"]
    want = evaluate(graph, m.feeds)
    for name, y in execute(graph, m.feeds).items():
        np.testing.assert_allclose(y, want[name], rtol=2e-6, atol=2e-6)


def trained(m: Layer) -> Graph:
    """The head's loss with its gradients by x, w and bias."""
    _, loss = head(m)
    m.graph.outputs = {"loss": loss}
    assert fused(linear_cross_entropy, m.graph) == 1
    dead_code_elimination(m.graph)
    graph = vjp(m.graph, ["loss"], ["x", "w", "bias"])
    m.feeds["cotangent.loss"] = np.array(0.5, np.float32)
    return graph


def test_loss_and_gradients_become_one_step(execute: Run) -> None:
    m = Layer()
    graph = trained(m)
    assert sorted(ops(graph)) == ["LinearCrossEntropy", "LinearCrossEntropyGrad"]
    m.same(graph, alone(linear_cross_entropy_step), 1)
    assert ops(graph) == ["LinearCrossEntropyStep"]
    want = evaluate(graph, m.feeds)
    for name, y in execute(graph, m.feeds).items():
        np.testing.assert_allclose(y, want[name], rtol=2e-6, atol=2e-6)


def behind_the_loss(graph: Graph) -> Builder:
    """A builder before the gradient, to which the loss would move."""
    loss = graph.outputs["loss"].producer()
    assert loss is not None
    return Builder(graph, before=list(graph)[list(graph).index(loss) + 1])


def test_what_reads_the_loss_alone_moves_with_it(execute: Run) -> None:
    m = Layer()
    graph = trained(m)
    b = behind_the_loss(graph)
    graph.outputs["scaled"] = b.Mul(b.Neg(graph.outputs["loss"]), 2.0)
    m.same(graph, alone(linear_cross_entropy_step), 1)
    assert ops(graph) == ["LinearCrossEntropyStep", "Neg", "Mul"]
    want = evaluate(graph, m.feeds)
    for name, y in execute(graph, m.feeds).items():
        np.testing.assert_allclose(y, want[name], rtol=2e-6, atol=2e-6)


def test_python_code_that_reads_the_loss_keeps_its_place() -> None:
    m = Layer()
    graph = trained(m)
    attrs = {"site": 0, "path": "", "reason": "", "shapes": "", "dtypes": "f32", "wrt": ""}
    seen: Any = behind_the_loss(graph).node("Region", [graph.outputs["loss"]], attrs)
    graph.outputs["seen"] = seen
    assert reasons(linear_cross_entropy_step, graph) == ["Python code or other ranks read the loss"]


def test_a_gradient_that_depends_on_the_loss_stays_apart() -> None:
    m = Layer()
    graph = trained(m)
    grad = next(node for node in graph if node.op_type == "LinearCrossEntropyGrad")
    scaled = behind_the_loss(graph).Mul(graph.outputs["loss"], 2.0)
    grad.replace_input_with(0, scaled)
    assert reasons(linear_cross_entropy_step, graph) == ["its gradient depends on the loss"]
