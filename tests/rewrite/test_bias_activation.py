"""The pass that puts a product's bias into the activation after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import tiny
import torch
from fusing import fused as fuse
from fusing import reasons
from op_cases import stopped
from torch import nn
from torch.nn import functional as F
from transformers.utils.generic import ModelOutput

from onward.differentiate import vjp
from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value, attributes
from onward.graph.types import parse_type
from onward.rewrite.bias_activation import bias_activation
from onward.rewrite.dead_code_elimination import dead_code_elimination

Write = Callable[[Builder, dict[str, Value]], Value]
RNG = np.random.default_rng(0)
SHAPES = {"x": (6, 4), "w": (4, 5), "wt": (5, 4), "bias": (5,), "column": (6, 1), "other": (6, 5)}
FEEDS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def graph_of(write: Write, shapes: dict[str, str] | None = None) -> Graph:
    graph = Graph("f")
    text = {k: f"f32[{','.join(map(str, s))}]" for k, s in SHAPES.items()} | (shapes or {})
    v = {k: graph.input(k, parse_type(t), Role.PARAM) for k, t in text.items()}
    graph.outputs = {"y": write(Builder(graph, module="layer"), v)}
    return graph


def ops(graph: Graph) -> list[str]:
    return [node.op_type for node in graph]


def product(b: Builder, v: dict[str, Value]) -> Value:
    return b.Gemm(v["x"], v["w"], v["bias"])


def silu(b: Builder, x: Value, first: bool = True) -> Value:
    gate = b.Sigmoid(x)
    return b.Mul(x, gate) if first else b.Mul(gate, x)


MATCHED: dict[str, tuple[str, Write]] = {
    "gelu": ("gelu", lambda b, v: b.Gelu(product(b, v))),
    "gelu by name": ("gelu", lambda b, v: b.Gelu(product(b, v), approximate="none")),
    "tanh": ("gelu_tanh", lambda b, v: b.Gelu(product(b, v), approximate="tanh")),
    "relu": ("relu", lambda b, v: b.Relu(product(b, v))),
    "silu": ("silu", lambda b, v: silu(b, product(b, v))),
    "silu turned round": ("silu", lambda b, v: silu(b, product(b, v), first=False)),
    "transposed weight": (
        "relu", lambda b, v: b.Relu(b.Gemm(v["x"], v["wt"], v["bias"], transB=1)),
    ),
    "scaled product": (
        "relu", lambda b, v: b.Relu(b.Gemm(v["x"], v["w"], v["bias"], alpha=0.5, beta=1.0)),
    ),
    "behind a reshape": ("gelu", lambda b, v: b.Gelu(b.reshape(product(b, v), (2, 3, 5)))),
    "behind two reshapes": (
        "silu", lambda b, v: silu(b, b.reshape(b.reshape(product(b, v), (2, 3, 5)), (30,))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MATCHED)
def test_an_activation_takes_the_bias_of_its_product(name: str) -> None:
    activation, write = MATCHED[name]
    graph = graph_of(write)
    want = evaluate(graph, FEEDS)["y"]
    gemm = attributes(next(n for n in graph if n.op_type == "Gemm"))
    assert fuse(bias_activation, graph) == 1
    assert dead_code_elimination(graph) == 0, "it leaves nothing to sweep"
    left = [op for op in ops(graph) if op != "Reshape"]
    assert left == ["Gemm", "BiasActivation"]
    product, fused = (next(n for n in graph if n.op_type == op) for op in left)
    assert len(product.inputs) == 2
    assert attributes(product) == {k: x for k, x in gemm.items() if k != "beta"}
    assert attributes(fused) == {"activation": activation}
    have = evaluate(graph, FEEDS)["y"]
    assert have.shape == want.shape
    np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6)
    assert fuse(bias_activation, graph) == 0


def read_twice(b: Builder, v: dict[str, Value]) -> Value:
    u = product(b, v)
    return b.Add(b.Relu(u), u)


def reshape_read_twice(b: Builder, v: dict[str, Value]) -> Value:
    u = b.reshape(product(b, v), (2, 3, 5))
    return b.Add(b.Relu(u), u)


def gate_read_twice(b: Builder, v: dict[str, Value]) -> Value:
    u = product(b, v)
    gate = b.Sigmoid(u)
    return b.Add(b.Mul(u, gate), gate)


OTHERS = "the product with its bias is read by other ops too"
NO_BIAS = "what is added to the matrix product is not a bias (one number per feature)"

# what is left, and why where it is a near miss
LEFT: dict[str, tuple[Write, str | None]] = {
    "no bias": (lambda b, v: b.Relu(b.Gemm(v["x"], v["w"])), None),
    "a scaled bias": (lambda b, v: b.Relu(b.Gemm(v["x"], v["w"], v["bias"], beta=0.5)), NO_BIAS),
    "an addend a row": (lambda b, v: b.Relu(b.Gemm(v["x"], v["w"], v["column"])), NO_BIAS),
    "an addend an element": (lambda b, v: b.Relu(b.Gemm(v["x"], v["w"], v["other"])), NO_BIAS),
    "the product is read twice": (read_twice, OTHERS),
    "the reshape is read twice": (reshape_read_twice, OTHERS),
    "the product is an output": (lambda b, v: b.Gelu(product(b, v)), OTHERS),
    "the gate is read twice": (gate_read_twice, None),
    "a gate of something else": (lambda b, v: b.Mul(product(b, v), b.Sigmoid(v["other"])), None),
    "a stopped gradient between": (lambda b, v: b.Relu(stopped(b, product(b, v))), None),
    "another activation": (lambda b, v: b.Tanh(product(b, v)), None),
    "a transpose between": (lambda b, v: b.Relu(b.transpose(product(b, v), [1, 0])), None),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_almost_the_pattern_is_left(name: str) -> None:
    write, reason = LEFT[name]
    graph = graph_of(write)
    if name == "the product is an output":
        graph.outputs["u"] = next(n for n in graph if n.op_type == "Gemm").outputs[0]
    before = ops(graph)
    assert reasons(bias_activation, graph) == ([] if reason is None else [reason])
    assert ops(graph) == before


def test_sizes_may_be_symbols() -> None:
    def write(b: Builder, v: dict[str, Value]) -> Value:
        rows = b.Reshape(v["x"], b.ints([-1, 4]))
        return b.Gelu(b.Reshape(b.Gemm(rows, v["w"], v["bias"]), b.ints([-1, 3, 5])))

    graph = graph_of(write, {"x": "f32[B,3,4]"})
    feeds = FEEDS | {"x": FEEDS["x"].reshape(2, 3, 4)}
    want = evaluate(graph, feeds)["y"]
    assert fuse(bias_activation, graph) == 1
    np.testing.assert_allclose(evaluate(graph, feeds)["y"], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])
def test_gradients_are_those_of_the_graph_before(kind: str) -> None:
    name = {"gelu_tanh": "tanh"}.get(kind, kind)

    def write(b: Builder, v: dict[str, Value]) -> Value:
        return b.reduce_sum(b.Mul(MATCHED[name][1](b, v), v["other"]), [0, 1], keepdims=False)

    results = []
    for fused in (False, True):
        graph = graph_of(write)
        graph.outputs = {"loss": graph.outputs["y"]}
        assert fuse(bias_activation, graph) == 1 if fused else True
        step = vjp(graph, ["loss"], ["x", "w", "bias"])
        assert ("BiasActivationGrad" in ops(step)) == fused
        results.append(evaluate(step, FEEDS | {"cotangent.loss": np.array(1.0, np.float32)}))
    for key, want in results[0].items():
        np.testing.assert_allclose(results[1][key], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "count"), [("gpt2", 2), ("bert", 3)])
def test_models_are_fused_and_it_can_be_switched_off(kind: str, count: int) -> None:
    """BERT's third is in the head of the masked language model."""
    model, data = {"gpt2": tiny.gpt2, "bert": tiny.bert}[kind](), tiny.batch()
    made = tiny.compiled(model, data)
    assert ops(made.forward).count("BiasActivation") == count
    assert "Gelu" not in ops(made.forward)
    off = tiny.compiled(model, data, disable=["bias_activation"])
    assert "BiasActivation" not in ops(off.forward)


@dataclass
class Output(ModelOutput):
    loss: torch.Tensor


def test_relu_keeps_one_tensor_for_backward_and_the_others_two() -> None:
    """Relu's slope shows in y, so the product's result may be overwritten by it."""
    from onward.plan import make_plan
    from onward.rewrite import specialize

    held = {}
    for kind in ("relu", "silu"):

        def write(b: Builder, v: dict[str, Value], kind: str = kind) -> Value:
            y = MATCHED[kind][1](b, v)
            return b.reduce_sum(b.Gemm(y, v["wt"]), [0, 1], keepdims=False)

        graph = graph_of(write)
        graph.outputs = {"loss": graph.outputs["y"]}
        assert fuse(bias_activation, graph) == 1
        plan = make_plan(specialize(vjp(graph, ["loss"], ["x", "w", "wt", "bias"]), {}), {})
        (fused,) = [launch for launch in plan.launches if launch.op == "BiasActivation"]
        held[kind] = fused.outputs[0].buffer == fused.inputs[0].buffer  # type: ignore[union-attr]
    assert held == {"relu": True, "silu": False}


@pytest.mark.parametrize("function", [F.silu, F.relu, F.gelu])
def test_a_module_s_gradients_are_those_of_torch(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 24), nn.Linear(24, 3)

        def forward(self, x: torch.Tensor) -> Output:
            return Output(self.outer(function(self.inner(x))).square().mean())

    model, data = Layers(), {"x": torch.randn(3, 5, 8)}
    made = tiny.compiled(model, data)
    assert ops(made.forward).count("BiasActivation") == 1
    have = tiny.gradients(model, data)
    for name, want in tiny.eager(model, data, torch.float32).items():
        torch.testing.assert_close(have[name], want, rtol=1e-5, atol=1e-7)
