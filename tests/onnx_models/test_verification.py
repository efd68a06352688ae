"""A session verifies itself beside stock onnxruntime: nothing is found in right models of each
kind, and a small wrong in one gradient rule, pass or kernel is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx_files import TRANSFORMERS, Logits, Pooled, exported, padded_tokens, words_file
from planting import after, attribute, gradient, grown, kernel, scaled

import onward
from onward import TrainingSession, loss
from onward.errors import MissingExtraError, OnwardError
from onward.graph.graph import type_of

Feeds = dict[str, np.ndarray]
SLOPE = "central differences of onnxruntime's loss"


def words() -> tuple[TrainingSession, Feeds]:
    file = words_file()
    ids = np.random.default_rng(0).integers(0, 50, (4, 7))
    made = TrainingSession(file, onward.optim.SGD(lr=0.1), loss.cross_entropy("logits"))
    return made, {"ids": ids, "labels": np.where(ids % 3 == 0, -100, ids)}


def transformer(name: str) -> tuple[TrainingSession, Feeds]:
    torch.manual_seed(0)
    tokens = padded_tokens()
    file = exported(Logits(TRANSFORMERS[name](0.0)), tokens, ["logits"])
    chosen = loss.cross_entropy("logits", shift=name == "gpt2")
    labels = tokens["ids"].masked_fill(tokens["mask"] == 0, -100)
    feeds = {**{n: x.numpy() for n, x in tokens.items()}, "labels": labels.numpy()}
    return TrainingSession(file, onward.optim.SGD(lr=0.1), chosen), feeds


def pooled() -> tuple[TrainingSession, Feeds]:
    example = {n: torch.zeros(2, 5, dtype=torch.int64) for n in ("a", "b")}
    file = exported(Pooled(), example, ["query", "document"])
    generator = np.random.default_rng(1)
    feeds = {n: generator.integers(0, 50, (6, 5)) for n in ("a", "b")}
    return TrainingSession(
        file, onward.optim.SGD(lr=0.1), loss.contrastive("query", "document")
    ), feeds


def own_loss() -> tuple[TrainingSession, Feeds]:
    """A model that computes its loss: (x W)^2, the mean; W in a Constant node."""
    array = np.random.default_rng(2).standard_normal((4, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(array)),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Mul", ["y", "y"], ["z"]),
        helper.make_node("ReduceMean", ["z"], ["loss"], keepdims=0),
        helper.make_node("ArgMax", ["y"], ["best"], axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes, "own",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 4])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, []),
         helper.make_tensor_value_info("best", TensorProto.INT64, ["B"])],
    )  # fmt: skip
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    x = np.random.default_rng(3).standard_normal((5, 4)).astype(np.float32)
    return TrainingSession(file, onward.optim.SGD(lr=0.1), "loss"), {"x": x}


MODELS: dict[str, Callable[[], tuple[TrainingSession, Feeds]]] = {
    "words": words,
    **{name: lambda name=name: transformer(name) for name in TRANSFORMERS},
    "pooled": pooled,
    "own loss": own_loss,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_right_models_are_right_before_and_after_steps(name: str) -> None:
    session, feeds = MODELS[name]()
    for _ in range(2):
        before = session.state_dict()
        report = session.verify(feeds)
        assert report.ok, str(report)
        judged = [row for row in report.rows if row.engine == SLOPE]
        assert len(judged) > 0.7 * sum(p.requires_grad for p in session.module.parameters())
        for weight, array in session.state_dict().items():
            np.testing.assert_array_equal(array, before[weight])
        session.step(feeds)


def narrow(b: Any, dxs: list[Any], *_: Any) -> list[Any]:
    """A fault: the gradient of a table is that of the first half of its rows."""
    rows: Any = type_of(dxs[0]).shape[0]
    kept = b.slice(dxs[0], 0, 0, rows // 2)
    rest = b.Mul(b.slice(dxs[0], 0, rows // 2, rows), 0.0)
    return [b.Concat(kept, rest, axis=0), *dxs[1:]]


FAULTS: dict[str, tuple[str, Callable[..., None], str]] = {
    "a product's weight": ("words", gradient("Gemm", scaled(1, 1.02)), SLOPE),
    "a norm's gain": (
        "words", gradient("LayerNormalization", scaled(1, 0.98)), SLOPE,
    ),
    "half of a table": ("words", gradient("Gather", narrow), SLOPE),
    "a square's slope": ("own loss", gradient("Mul", scaled(0, 1.05)), SLOPE),
    "attention's values": (
        "gpt2", gradient("FlashAttention", scaled(2, 1.05)), SLOPE,
    ),
    "attention's kernel": (
        "gpt2", kernel("FlashAttention", grown(0, 1.02)), "outputs",
    ),
    "attention's scale": (
        "gpt2",
        after(
            "flash_attention", attribute("FlashAttention", "scale", lambda x: x * 1.05)
        ),
        "outputs",
    ),
    "a norm's epsilon": (
        "bert",
        after(
            "add_layer_norm", attribute("AddLayerNormalization", "epsilon", 1e-3)
        ),
        "outputs",
    ),
    "an activation": (
        "bert",
        after(
            "bias_activation", attribute("BiasActivation", "activation", "gelu_tanh")
        ),
        "outputs",
    ),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plant, where = FAULTS[name]
    session, feeds = MODELS[model]()
    plant(monkeypatch)
    report = session.verify(feeds)
    assert not report.ok
    assert any(where in row.engine for row in report.rows if not row.ok), str(report)


def test_a_session_without_a_loss_compares_its_outputs() -> None:
    session, feeds = words()
    plain = TrainingSession(session.source.given)
    report = plain.verify({"ids": feeds["ids"]})
    assert report.ok and [row.name for row in report.rows] == ["logits"]


def test_only_the_weights_that_are_named() -> None:
    session, feeds = words()
    report = session.verify(feeds, weights=["norm.*"])
    names = [row.name for row in report.rows if row.engine == SLOPE]
    assert names == ["grad.norm.weight", "grad.norm.bias"]
    with pytest.raises(OnwardError, match=r"no weight is named 'nrom\.\*'; fix: "):
        session.verify(feeds, weights=["nrom.*"])


def test_it_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    session, feeds = words()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"onward\[ort\]"):
        session.verify(feeds)
