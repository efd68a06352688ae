"""Dropout that is put back into a file: the session trains as a Trainer trains the module that has
it at the same places, with the same masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_files import exported
from torch import nn
from torch.nn import functional as F

import onward
from onward import TrainingSession, loss
from onward.errors import OnwardError


class Words(nn.Module):
    """Words, a layer and logits, with dropout behind the first two or without."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.head = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 50)
        self.ratio = ratio

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.table(ids), self.ratio, self.training)
        x = F.dropout(F.relu(self.up(x)), self.ratio, self.training)
        return self.head(x)


def file() -> onnx.ModelProto:
    model = Words(0.0).eval()
    return exported(model, {"ids": torch.zeros(2, 5, dtype=torch.int64)}, ["logits"])


def behind(model: onnx.ModelProto, ratio: float) -> dict[str, float]:
    """The places: what the words' Gather makes, and what Relu makes."""
    ops = {node.op_type: node.output[0] for node in model.graph.node}
    return {ops["Gather"]: ratio, ops["Relu"]: ratio}


def batch(step: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(step).integers(0, 50, (4, 6))
    return {"ids": ids, "labels": np.roll(ids, 1, 1)}


def test_steps_are_those_of_the_module_with_dropout() -> None:
    model = file()
    session = TrainingSession(
        model, onward.optim.SGD(lr=0.5), loss.cross_entropy("logits"),
        options=onward.TrainerOptions(seed=7), dropout=behind(model, 0.4),
    )  # fmt: skip
    plain = TrainingSession(model, onward.optim.SGD(lr=0.5), loss.cross_entropy("logits"))

    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    trainer = onward.Trainer(
        Words(0.4).train(), onward.optim.SGD(lr=0.5), loss_fn=cross_entropy,
        options=onward.TrainerOptions(seed=7),
    )  # fmt: skip
    for step in range(5):
        given = batch(step)
        found = session.step(given).loss
        tensors = {n: torch.from_numpy(x) for n, x in given.items()}
        want = float(trainer.train_step(tensors).loss)
        assert found == pytest.approx(want, rel=1e-5)
        assert abs(found - plain.step(given).loss) > 1e-3
    given = batch(9)
    stock: Any = onnxruntime.InferenceSession(session.export_onnx().SerializeToString())
    [want_logits] = stock.run(["logits"], {"ids": given["ids"]})
    np.testing.assert_allclose(
        session.predict({"ids": given["ids"]})["logits"], want_logits, rtol=1e-4, atol=1e-5
    )
    expected = float(trainer.eval_step({n: torch.from_numpy(x) for n, x in given.items()}).loss)
    assert session.evaluate(given).loss == pytest.approx(expected, rel=1e-5)
    report = session.verify(given)
    assert report.ok, str(report)
    assert not any(node.op_type == "Dropout" for node in session.export_onnx().graph.node)


def test_what_a_body_reads_is_dropped_too() -> None:
    body: dict[str, Any] = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Mul", ["h", "k"], [name])], name, [],
            [helper.make_empty_tensor_value_info(name)],
            [numpy_helper.from_array(np.array(factor, np.float32), "k")],
        )
        for name, factor in (("then", 1.0), ("else", 2.0))
    }  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["h"]),
         helper.make_node("If", ["go"], ["y"], **body)],
        "choice",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 100]),
         helper.make_tensor_value_info("go", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 100])],
        [numpy_helper.from_array(np.zeros(100, np.float32), "w")],
    )  # fmt: skip
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    session = TrainingSession(model, onward.optim.SGD(lr=0.0), loss.mse("y"), dropout={"h": 0.25})
    feeds = {"x": np.ones((40, 100), np.float32), "go": np.array(False)}
    feeds["labels"] = feeds["x"]
    made = session.step(feeds, fetch=["y"]).outputs["y"]
    zeros = float((made == 0).mean())
    assert 0.2 < zeros < 0.3
    np.testing.assert_allclose(made[made != 0], 2 / 0.75, rtol=1e-6)
    np.testing.assert_allclose(session.evaluate(feeds, fetch=["y"]).outputs["y"], 2.0)


REFUSED: dict[str, tuple[dict[str, float], str]] = {
    "no such value": (
        {"nothing": 0.1},
        "dropout 'nothing' names no floating value of a node; fix: names",
    ),
    "a value twice": ({"*Relu*": 0.1, "*": 0.1}, "names '.*' a second time"),
    "no probability": ({"*": 1.0}, "is 1.0; fix: a number from 0 to below 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_places_that_are_none_are_refused(name: str) -> None:
    places, said = REFUSED[name]
    with pytest.raises(OnwardError, match=said):
        TrainingSession(file(), dropout=places)


def test_an_opset_without_such_a_node_is_refused() -> None:
    model = exported(
        Words(0.0).eval(), {"ids": torch.zeros(2, 5, dtype=torch.int64)}, ["logits"], opset=11
    )
    with pytest.raises(OnwardError, match=r"opset 11 has no dropout that trains; fix: convert"):
        TrainingSession(model, dropout=behind(model, 0.1))


def test_a_pattern_passes_over_shapes_and_truths() -> None:
    """Sizes are computed from the batch's, and a condition chooses; both match the pattern."""
    floats, wholes = TensorProto.FLOAT, TensorProto.INT64
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    held = {"zero": np.array([0]), "one": np.array([1]), "rest": np.array([4])}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["n.h"]),
        helper.make_node("Shape", ["x"], ["n.shape"]),
        helper.make_node("Slice", ["n.shape", "zero", "one"], ["n.rows"]),
        helper.make_node("Concat", ["n.rows", "rest"], ["n.sizes"], axis=0),
        helper.make_node("Cast", ["n.sizes"], ["n.again"], to=wholes),
        helper.make_node("Greater", ["n.h", "n.h"], ["n.truth"]),
        helper.make_node("Where", ["n.truth", "x", "n.h"], ["n.chosen"]),
        helper.make_node("Reshape", ["n.chosen", "n.again"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, floats, ["B", 4]) for name in ("x", "y")]
    graph = helper.make_graph(
        nodes, "shapes", ends[:1], ends[1:],
        [weight, *(numpy_helper.from_array(x, n) for n, x in held.items())],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = TrainingSession(
        model, onward.optim.SGD(lr=0.0), loss.mse("y"), dropout={"n.*": 0.5}
    )  # fmt: skip
    feeds = {"x": np.ones((400, 4), np.float32), "labels": np.ones((400, 4), np.float32)}
    made = session.step(feeds, fetch=["y"]).outputs["y"]
    assert set(np.unique(made)) == {0.0, 4.0}, "twice dropped, each by a half"
    assert 0.15 < float((made == 4).mean()) < 0.35
    np.testing.assert_array_equal(session.evaluate(feeds, fetch=["y"]).outputs["y"], feeds["x"])
