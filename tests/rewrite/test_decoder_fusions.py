"""The passes that find a gated product, a norm by the root, turned heads and shared keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from fusing import fused as fuse
from fusing import reasons
from op_cases import stopped
from tiny_families import CASES

from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value, attributes, type_of
from onward.graph.types import parse_type
from onward.rewrite.flash_attention import flash_attention
from onward.rewrite.gated_activation import gated_activation
from onward.rewrite.grouped_keys import grouped_keys
from onward.rewrite.rms_norm import rms_norm
from onward.rewrite.rotary import rotary

TYPES = {
    "x": "f32[2,3,5,8]", "up": "f32[2,3,5,8]", "scale": "f32[8]", "row": "f32[2,3,5,1]",
    "cos": "f32[1,1,5,8]", "sin": "f32[1,1,5,8]", "flat": "f32[5,8]", "some": "f32[1,1,5,4]",
    "k": "f32[2,2,6,8]", "v": "f32[2,2,6,4]", "q": "f32[2,4,5,8]",
}  # fmt: skip
Write = Callable[[Builder, dict[str, Value]], "Value | tuple[Value, ...]"]


def graph_of(write: Write) -> Graph:
    graph = Graph("f")
    v = {k: graph.input(k, parse_type(t), Role.BATCH) for k, t in TYPES.items()}
    made = write(Builder(graph, module="layer"), v)
    values = made if isinstance(made, tuple) else (made,)
    graph.outputs = {f"y{i}": y for i, y in enumerate(values)}
    return graph


def feeds() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal([int(n) for n in text[4:-1].split(",")]).astype(np.float32)
        for name, text in TYPES.items()
    }


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op_type for node in graph)


def silu(b: Builder, x: Value) -> Value:
    return b.Mul(x, b.Sigmoid(x))


def norm(
    b: Builder, x: Value, scale: Value, power: bool = False, divided: bool = False, dim: int = 3
) -> Value:
    square = b.Pow(x, 2.0) if power else b.Mul(x, x)
    root = b.Sqrt(b.Add(b.ReduceMean(square, b.ints([dim]), keepdims=1), 1e-5))
    y = b.Div(x, root) if divided else b.Mul(x, b.Reciprocal(root))
    return b.Mul(scale, y)


def halves(b: Builder, x: Value, dim: int = 3) -> tuple[Value, Value]:
    width = type_of(x).shape[dim]
    assert isinstance(width, int)
    return b.slice(x, dim, 0, width // 2), b.slice(x, dim, width // 2, width)


def turned(b: Builder, x: Value, neighbours: bool = False) -> Value:
    if not neighbours:
        first, second = halves(b, x)
        return b.Concat(b.Neg(second), first, axis=3)
    width = type_of(x).shape[3]
    assert isinstance(width, int)
    first, second = (b.Gather(x, b.ints(list(range(i, width, 2))), axis=3) for i in (0, 1))
    pairs = b.Concat(b.unsqueeze(b.Neg(second), [4]), b.unsqueeze(first, [4]), axis=4)
    return b.reshape(pairs, type_of(x).shape)


def rotated(b: Builder, x: Value, cos: Value, sin: Value, neighbours: bool = False) -> Value:
    return b.Add(b.Mul(x, cos), b.Mul(turned(b, x, neighbours), sin))


def partly(b: Builder, v: dict[str, Value], neighbours: bool = False) -> Value:
    first, rest = halves(b, v["x"])
    return b.Concat(rotated(b, first, v["some"], v["some"], neighbours), rest, axis=3)


def repeated(b: Builder, x: Value) -> Value:
    batch, heads, *rows = type_of(x).shape
    wide = b.expand(b.unsqueeze(x, [2]), (batch, heads, 2, *rows))
    return b.reshape(wide, (batch, 4, *rows))


def tiled(b: Builder, x: Value) -> Value:
    """Keys tiled over heads (0, 1, 0, 1): not the order (0, 0, 1, 1) that grouped attention
    means."""
    batch, heads, *rows = type_of(x).shape
    wide = b.expand(b.unsqueeze(x, [1]), (batch, 2, heads, *rows))
    return b.reshape(wide, (batch, 4, *rows))


def attend(b: Builder, v: dict[str, Value], repeat: Any = repeated) -> Value:
    return b.Attention(v["q"], repeat(b, v["k"]), repeat(b, v["v"]), scale=0.5, is_causal=0)


# pass, program, the resulting op with its attributes, and the ops that are left beside it
TAKEN: dict[str, tuple[Any, Write, str, dict[str, Any], list[str]]] = {
    "silu": (
        gated_activation, lambda b, v: b.Mul(silu(b, v["x"]), v["up"]), "GatedActivation",
        {"activation": "silu"}, [],
    ),
    "gelu second": (
        gated_activation, lambda b, v: b.Mul(v["up"], b.Gelu(v["x"], approximate="tanh")),
        "GatedActivation", {"activation": "gelu_tanh"}, [],
    ),
    "its own gate": (
        gated_activation, lambda b, v: b.Mul(b.Relu(v["x"]), v["x"]), "GatedActivation",
        {"activation": "relu"}, [],
    ),
    "norm": (rms_norm, lambda b, v: norm(b, v["x"], v["scale"]), "RMSNorm", {}, []),
    "norm by a power, divided": (
        rms_norm, lambda b, v: norm(b, v["x"], v["scale"], True, True), "RMSNorm", {}, [],
    ),
    "norm with a scale of its own": (
        rms_norm, lambda b, v: norm(b, v["x"], b.Add(v["scale"], 1.0)), "RMSNorm", {}, ["Add"],
    ),
    "halves": (
        rotary, lambda b, v: rotated(b, v["x"], v["cos"], v["sin"]), "Rotary",
        {"interleaved": 0}, [],
    ),
    "neighbours": (
        rotary, lambda b, v: rotated(b, v["x"], v["cos"], v["sin"], True), "Rotary",
        {"interleaved": 1}, [],
    ),
    "angles of fewer dims": (
        rotary, lambda b, v: rotated(b, v["x"], v["flat"], v["flat"]), "Rotary", {},
        ["Reshape", "Reshape"],
    ),
    "some halves": (rotary, partly, "Rotary", {"interleaved": 0}, []),
    "some neighbours": (rotary, lambda b, v: partly(b, v, True), "Rotary", {"interleaved": 1}, []),
    "repeated keys": (
        lambda g, _: grouped_keys(g), lambda b, v: (attend(b, v), b.Neg(v["k"])), "Attention", {},
        ["Unsqueeze", "Unsqueeze", "Expand", "Expand", "Reshape", "Reshape", "Neg"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_pattern_becomes_its_op_and_says_the_same(name: str) -> None:
    apply, write, op, attrs, left = TAKEN[name]
    graph = graph_of(write)
    want = evaluate(graph, feeds())
    assert fuse(apply, graph) == 1
    check(graph)
    assert ops(graph) == Counter([op, *left])
    (node,) = [n for n in graph if n.op_type == op]
    assert attrs.items() <= attributes(node).items()
    for key, y in evaluate(graph, feeds()).items():
        np.testing.assert_allclose(y, want[key], rtol=2e-6, atol=2e-6)
    assert fuse(apply, graph) == 0


def two_readers(b: Builder, v: dict[str, Value]) -> tuple[Value, ...]:
    y = silu(b, v["x"])
    return b.Mul(y, v["up"]), b.Neg(y)


def half_stopped(b: Builder, v: dict[str, Value]) -> Value:
    y = turned(b, v["x"])
    return b.Add(b.Mul(v["x"], v["cos"]), b.Mul(stopped(b, y), v["sin"]))


def other_features(b: Builder, v: dict[str, Value]) -> Value:
    """A rotation in which the turned operand is not the scaled one."""
    return b.Add(b.Mul(v["up"], v["cos"]), b.Mul(turned(b, v["x"]), v["sin"]))


def turned_back(b: Builder, v: dict[str, Value]) -> Value:
    first, second = halves(b, v["x"])
    back = b.Concat(second, b.Neg(first), axis=3)
    return b.Add(b.Mul(v["x"], v["cos"]), b.Mul(back, v["sin"]))


def other_half_negative(b: Builder, v: dict[str, Value]) -> Value:
    first, second = halves(b, v["x"])
    back = b.Concat(b.Neg(first), second, axis=3)
    return b.Add(b.Mul(v["x"], v["cos"]), b.Mul(back, v["sin"]))


def one_half_twice(b: Builder, v: dict[str, Value]) -> Value:
    _, second = halves(b, v["x"])
    back = b.Concat(b.Neg(second), second, axis=3)
    return b.Add(b.Mul(v["x"], v["cos"]), b.Mul(back, v["sin"]))


NO_SUM = "the rotated half times the sine is not added to a product with the cosine"
LEFT: dict[str, tuple[Any, Write, list[str]]] = {
    "read by two": (gated_activation, two_readers, ["the activation is read by other ops too"]),
    "a broadcast factor": (
        gated_activation, lambda b, v: b.Mul(silu(b, v["x"]), v["row"]), [],
    ),
    "silu alone": (gated_activation, lambda b, v: silu(b, v["x"]), []),
    "norm over another dim": (rms_norm, lambda b, v: norm(b, v["x"], v["scale"], dim=2), []),
    "norm without a scale": (
        rms_norm, lambda b, v: norm(b, v["x"], v["row"]),
        ["no product with a weight of one number per feature follows"],
    ),
    "other features": (rotary, other_features, [NO_SUM]),
    "turned back": (rotary, turned_back, []),
    "the other half negative": (rotary, other_half_negative, []),
    "one half twice": (rotary, one_half_twice, []),
    "a turn that stops gradients": (rotary, half_stopped, [NO_SUM]),
    "keys tiled": (lambda g, _: grouped_keys(g), lambda b, v: attend(b, v, tiled), []),
    "keys alone repeated": (
        lambda g, _: grouped_keys(g),
        lambda b, v: b.Attention(
            v["q"], repeated(b, v["k"]), tiled(b, v["v"]), scale=0.5, is_causal=0
        ),
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_only_looks_like_it_is_left(name: str) -> None:
    apply, write, why = LEFT[name]
    graph = graph_of(write)
    before = ops(graph)
    assert reasons(apply, graph) == why
    assert ops(graph) == before


def test_shared_keys_go_to_the_kernel_as_they_are() -> None:
    graph = graph_of(attend)
    want = evaluate(graph, feeds())["y0"]
    assert grouped_keys(graph) == fuse(flash_attention, graph) == 1
    (node,) = [n for n in graph if n.op_type == "FlashAttention"]
    assert [v.name for v in node.inputs[1:3] if v is not None] == ["k", "v"]
    np.testing.assert_allclose(evaluate(graph, feeds())["y0"], want, rtol=2e-6, atol=2e-6)


# for each family, the number of each op that one layer and the end of a model have
MODELS: dict[str, dict[str, int]] = {
    "Qwen3, norms of heads": {
        "Rotary": 2, "RMSNorm": 3, "AddRMSNorm": 2, "GatedActivation": 1, "FlashAttention": 1,
    },
    "Cohere, neighbours turned": {"Rotary": 2, "GatedActivation": 1, "FlashAttention": 1},
    "GPT-NeoX, half of a head turned": {"Rotary": 2, "FlashAttention": 1, "BiasActivation": 1},
    "ModernBERT, a gate of one product": {"Rotary": 4, "GatedActivation": 2},
    "T5 with both masks": {"RMSNorm": 2, "AddRMSNorm": 7, "GatedActivation": 3},
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_others_have_them(name: str) -> None:
    make, data = CASES[name]
    found = ops(tiny.compiled(make(), data()).forward)
    assert {op: found[op] for op in MODELS[name]} == MODELS[name]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_with_dropout_is_that_of_the_parts(name: str) -> None:
    """Fused and unfused steps draw the same masks: losses and gradients differ by rounding
    alone."""
    make, data = CASES[name]
    model = make()
    for key, value in vars(model.config).items():
        if key.endswith(("dropout", "dropout_rate", "dropout_prob")) and isinstance(value, float):
            setattr(model.config, key, 0.25)
    for part in model.modules():
        for key, value in list(vars(part).items()):
            if "dropout" in key and isinstance(value, float):
                setattr(part, key, 0.25)
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.25
    passes = ["rms_norm", "rotary", "gated_activation", "grouped_keys", "add_layer_norm"]
    results = []
    for disable in ([], passes):
        made = tiny.compiled(model, data(), disable=disable)
        step = made.differentiated(tiny.trained(made))
        names = ["loss", *(f"grad.{n}" for n in tiny.trained(made))]
        results.append(tiny.execute(made, step, data(), names))
    have, want = results
    for key in want:
        torch.testing.assert_close(have[key], want[key], rtol=1e-4, atol=1e-6, msg=key)
