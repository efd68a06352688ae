"""Models that choose what they compute by an input of one number, with weights in the bodies that
they choose among."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward import TrainingSession, loss
from onward.errors import OnwardError

RNG = np.random.default_rng(0)


def array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


WIDE, NARROW, BIAS, OUTER = array(4, 3), array(4, 3), array(3), array(4, 4)


def body(name: str, weight: np.ndarray, is_constant: bool, inner: bool = False) -> onnx.GraphProto:
    """y = x w + b; both bodies call their weight `w`. inner: adds within an If of its own."""
    nodes: list[onnx.NodeProto] = []
    held: list[TensorProto] = [numpy_helper.from_array(BIAS, "b")]
    if is_constant:
        made = numpy_helper.from_array(weight, "value")
        nodes.append(helper.make_node("Constant", [], ["w"], value=made))
    else:
        held.append(numpy_helper.from_array(weight, "w"))
    y = helper.make_empty_tensor_value_info(f"{name}_y")
    nodes.append(helper.make_node("MatMul", ["h", "w"], [f"{name}_m"]))
    if not inner:
        nodes.append(helper.make_node("Add", [f"{name}_m", "b"], [y.name]))
        return helper.make_graph(nodes, name, [], [y], held)
    branches: dict[str, Any] = {}
    for key, factor in (("then_branch", 2.0), ("else_branch", 3.0)):
        z = helper.make_empty_tensor_value_info(f"{name}_{key}_z")
        scale = numpy_helper.from_array(np.full(3, factor, np.float32), "s")
        branches[key] = helper.make_graph(
            [helper.make_node("Mul", [f"{name}_m", "s"], [f"{name}_{key}_t"]),
             helper.make_node("Add", [f"{name}_{key}_t", "b"], [z.name])],
            f"{name}_{key}", [], [z], [scale],
        )  # fmt: skip
    nodes.append(helper.make_node("If", ["deep"], [y.name], **branches))
    return helper.make_graph(nodes, name, [], [y], held)


def model(rate: tuple[int, ...] = ()) -> onnx.ModelProto:
    """h = x u; the body that `rate` and `deep` choose. rate: the shape of the number."""
    nodes = [
        helper.make_node("MatMul", ["x", "u"], ["h"]),
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(
            np.full(rate, 16000, np.int64)
        )),
        helper.make_node("Equal", ["rate", "k"], ["is_wide"]),
        helper.make_node(
            "If", ["is_wide"], ["y"], then_branch=body("wide", WIDE, False, inner=True),
            else_branch=body("narrow", NARROW, True),
        ),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "chosen",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 4]),
         helper.make_tensor_value_info("rate", TensorProto.INT64, rate),
         helper.make_tensor_value_info("deep", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 3])],
        [numpy_helper.from_array(OUTER, "u")],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def feeds(rate: int, deep: bool, shape: tuple[int, ...] = (), rows: int = 5) -> dict[str, Any]:
    x = np.random.default_rng(rate + deep).standard_normal((rows, 4)).astype(np.float32)
    return {"x": x, "rate": np.full(shape, rate, np.int64), "deep": np.array(deep)}


CHOICES = [(16000, True), (16000, False), (8000, True), (16000, True)]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_predictions_are_those_of_onnxruntime(shape: tuple[int, ...]) -> None:
    file = model(shape)
    session = TrainingSession(file)
    stock: Any = onnxruntime.InferenceSession(file.SerializeToString())
    assert session.inputs["rate"] == ("i64[]" if not shape else "i64[1]")
    for rate, deep in CHOICES:
        given = feeds(rate, deep, shape)
        [want] = stock.run(["y"], given)
        np.testing.assert_allclose(session.predict(given)["y"], want, rtol=1e-5, atol=1e-6)


def test_each_body_trains_its_own_weights() -> None:
    """Beside PyTorch; what a step does not choose stays. The file has them back in their bodies."""
    file = model()
    session = TrainingSession(file, onward.optim.SGD(lr=0.01), loss.mse("y"))
    # helper.make_node sorts attributes: the bodies of "else" come first
    names = {"u": OUTER, "w": NARROW, "w_2": WIDE, "b": BIAS, "b_2": BIAS}
    names |= {"s": np.full(3, 3.0), "s_2": np.full(3, 2.0)}
    assert {n: x.shape for n, x in session.state_dict().items()} == {
        n: x.shape for n, x in names.items()
    }
    own = {n: torch.tensor(x, dtype=torch.float32).requires_grad_() for n, x in names.items()}
    optimizer = torch.optim.SGD(own.values(), lr=0.01)
    for rate, deep in CHOICES:
        given = feeds(rate, deep)
        labels = np.ones((5, 3), np.float32)
        found = session.step({**given, "labels": labels})
        h = torch.tensor(given["x"]) @ own["u"]
        if rate == 16000:
            y = h @ own["w_2"] * own["s_2" if deep else "s"] + own["b_2"]
        else:
            y = h @ own["w"] + own["b"]
        expected = torch.nn.functional.mse_loss(y, torch.tensor(labels))
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert found.loss == pytest.approx(expected.item(), rel=1e-5)
        assert session.verify({**given, "labels": labels}).ok
    for name, weight in session.state_dict().items():
        np.testing.assert_allclose(weight, own[name].detach(), atol=1e-5)
    written = session.export_onnx()
    onnx.checker.check_model(written)
    stock: Any = onnxruntime.InferenceSession(written.SerializeToString())
    for rate, deep in CHOICES:
        given = feeds(rate, deep)
        [want] = stock.run(["y"], given)
        np.testing.assert_allclose(session.predict(given)["y"], want, rtol=1e-5, atol=1e-6)
        again = TrainingSession(written).predict(given)["y"]
        np.testing.assert_allclose(again, want, rtol=1e-5, atol=1e-6)


def test_statistics_in_bodies_are_not_trained() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 3])
    held = [numpy_helper.from_array(np.ones(3, np.float32), n) for n in ("scale", "shift", "mean")]
    held.append(numpy_helper.from_array(np.full(3, 2.0, np.float32), "var"))
    norm = helper.make_node("BatchNormalization", ["x", "scale", "shift", "mean", "var"], ["a"])
    a = helper.make_empty_tensor_value_info("a")
    c = helper.make_empty_tensor_value_info("c")
    then = helper.make_graph([norm], "then", [], [a], held)
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["c"])], "other", [], [c])
    node = helper.make_node("If", ["go"], ["y"], then_branch=then, else_branch=other)
    go = helper.make_tensor_value_info("go", TensorProto.BOOL, [])
    graph = helper.make_graph([node], "norm", [x, go], [y])
    file = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    session = TrainingSession(file, onward.optim.SGD(lr=0.1), loss.mse("y"))
    assert set(session.state_dict()) == {"scale", "shift"}


def test_what_is_no_single_number_is_one_line() -> None:
    session = TrainingSession(model(), onward.optim.SGD(lr=0.1), loss.mse("y"))
    given = feeds(8000, False)
    with pytest.raises(OnwardError, match=r"rate is \[2\], and the model takes one number"):
        session.predict({**given, "rate": np.array([8000, 8000])})
    with pytest.raises(OnwardError, match=r"feeds lacks rate"):
        session.predict({"x": given["x"], "deep": given["deep"]})
    with pytest.raises(OnwardError, match=r"rate has to be a Python number"):
        x = torch.zeros(2, 4)
        session.trainer.train_step(
            {"x": x, "rate": torch.tensor(8000), "deep": True, "labels": torch.zeros(2, 3)}
        )
