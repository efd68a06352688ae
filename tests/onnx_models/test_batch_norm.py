"""Batch normalization of ONNX models in training: by the batch, with statistics that run on.

The references are onnx's own evaluator for a step's statistics, PyTorch for a run, and stock
onnxruntime for what is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from plain_run import run
from safetensors.numpy import load_file

import onward
from onward import loss
from onward.errors import OnwardError

ROWS, CHANNELS = 6, 3


def model_of(
    nodes: list[onnx.NodeProto], held: dict[str, np.ndarray], sizes: list[Any], opset: int
) -> onnx.ModelProto:
    """A model from x to y, both f32 of these sizes, with f32 initializers."""
    graph = helper.make_graph(
        nodes, "norm", [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, sizes)],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in held.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(made)
    return made


def model(
    training: bool = False,
    momentum: float | None = 0.9,
    twice: bool = False,
    outputs: bool = True,
    opset: int = 17,
) -> onnx.ModelProto:
    """x f32[B,3,L] -> BatchNormalization -> Relu -> a product per channel -> y. twice: a second
    node has the same statistics."""
    rng = np.random.default_rng(0)
    held = {
        "scale": 1 + 0.1 * rng.standard_normal(CHANNELS), "bias": rng.standard_normal(CHANNELS),
        "mean": 0.3 * rng.standard_normal(CHANNELS), "variance": 0.5 + rng.random(CHANNELS),
        "factor": rng.standard_normal((CHANNELS, 1)),
    }  # fmt: skip
    settings: dict[str, Any] = {"epsilon": 1e-3}
    if momentum is not None:
        settings["momentum"] = momentum
    names = ["n"]
    if training:
        settings["training_mode"] = 1
        names += ["mean_now", "variance_now"] if outputs else []
    statistics = ["scale", "bias", "mean", "variance"]
    nodes = [helper.make_node("BatchNormalization", ["x", *statistics], names, **settings)]
    last = "n"
    if twice:
        again = ["m", *(f"{n}_2" for n in names[1:])]
        nodes.append(helper.make_node("BatchNormalization", ["n", *statistics], again, **settings))
        last = "m"
    nodes += [
        helper.make_node("Relu", [last], ["r"]), helper.make_node("Mul", ["r", "factor"], ["y"]),
    ]  # fmt: skip
    return model_of(nodes, held, ["B", CHANNELS, "L"], opset)


def feeds(seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = (2 + rng.standard_normal((ROWS, CHANNELS, 5))).astype(np.float32)
    return {"x": x, "labels": rng.standard_normal(x.shape).astype(np.float32)}


def inferred(given: onnx.ModelProto, batch: dict[str, np.ndarray]) -> np.ndarray:
    """What stock onnxruntime computes of y."""
    runtime = onnxruntime.InferenceSession(given.SerializeToString())
    return np.asarray(runtime.run(None, {"x": batch["x"]})[0])


def session(
    given: onnx.ModelProto, batch_norm: bool | None = None, **options: Any
) -> onward.TrainingSession:
    optimizer = onward.optim.SGD(lr=0.1)
    return onward.TrainingSession(
        given, optimizer, loss.mse("y"), batch_norm=batch_norm, options=options
    )


class Reference(torch.nn.Module):
    """The model in PyTorch, by ONNX's rule of the running variance."""

    def __init__(self, momentum: float, uses: int = 1) -> None:
        super().__init__()
        held = {t.name: numpy_helper.to_array(t) for t in model().graph.initializer}
        self.scale, self.bias, self.factor = (
            torch.nn.Parameter(torch.tensor(held[name])) for name in ("scale", "bias", "factor")
        )
        self.mean, self.variance = torch.tensor(held["mean"]), torch.tensor(held["variance"])
        self.momentum, self.uses = momentum, uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.uses):
            mean, variance = x.mean((0, 2)), x.var((0, 2), unbiased=False)
            with torch.no_grad():
                m = self.momentum
                self.mean = m * self.mean + (1 - m) * mean
                self.variance = m * self.variance + (1 - m) * variance
            x = torch.nn.functional.batch_norm(
                x, None, None, self.scale, self.bias, training=True, eps=1e-3
            )
        return x.relu() * self.factor


@pytest.mark.parametrize(
    ("form", "batch_norm", "momentum", "uses"),
    [("inference", True, 0.9, 1), ("inference", True, 0.6, 1), ("inference", True, None, 1),
     ("inference", True, 0.9, 2), ("training", None, 0.9, 1), ("training", True, 0.6, 1),
     ("training", None, 0.9, 2)],
)  # fmt: skip
def test_steps_are_pytorchs(
    form: str, batch_norm: bool | None, momentum: float | None, uses: int
) -> None:
    given = model(form == "training", momentum, uses == 2)
    ours, theirs = session(given, batch_norm), Reference(momentum or 0.9, uses)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for i in range(5):
        batch = feeds(i)
        found = ours.step(batch).loss
        made = theirs(torch.tensor(batch["x"]))
        exact = torch.nn.functional.mse_loss(made, torch.tensor(batch["labels"]))
        optimizer.zero_grad()
        exact.backward()
        optimizer.step()
        assert found == pytest.approx(exact.item(), rel=1e-5)
    weights = ours.state_dict()
    for name in ("scale", "bias", "factor", "mean", "variance"):
        want = getattr(theirs, name).detach().numpy()
        np.testing.assert_allclose(weights[name], want, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("form", ["inference", "training"])
def test_one_step_moves_the_statistics_as_onnx_says(form: str) -> None:
    batch = feeds()
    reference = model(training=True)
    outputs = reference.graph.output
    for name in ("mean_now", "variance_now"):
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [CHANNELS]))
    results = ReferenceEvaluator(reference).run(None, {"x": batch["x"]})
    y, mean, variance = (np.asarray(x) for x in results)
    ours = session(model(form == "training"), True if form == "inference" else None)
    found = ours.step(batch, fetch=["y"])
    np.testing.assert_allclose(found.outputs["y"], y, rtol=1e-4, atol=1e-5)
    weights = ours.state_dict()
    np.testing.assert_allclose(weights["mean"], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights["variance"], variance, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["inference", "training"])
def test_evaluation_and_files_take_the_running_statistics(form: str) -> None:
    """The oracle is onnxruntime with the model in its inference form and the session's weights."""
    ours = session(model(form == "training"), True)
    for i in range(3):
        ours.step(feeds(i))
    held, batch = ours.state_dict(), feeds(9)
    stock = model()
    for tensor in stock.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(held[tensor.name], tensor.name))
    want = inferred(stock, batch)
    np.testing.assert_allclose(ours.predict({"x": batch["x"]})["y"], want, rtol=1e-5, atol=1e-6)
    exact = float(np.mean((want - batch["labels"]) ** 2))
    assert ours.evaluate(batch).loss == pytest.approx(exact, rel=1e-5)
    assert all((ours.state_dict()[n] == x).all() for n, x in held.items())
    written = ours.export_onnx()
    for tensor in written.graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), held[tensor.name])
    given = model(form == "training")
    assert [n.SerializeToString() for n in written.graph.node] == [
        n.SerializeToString() for n in given.graph.node
    ]


@pytest.mark.parametrize("batch_norm", [None, False])
def test_the_inference_form_keeps_its_statistics(batch_norm: bool | None) -> None:
    ours = session(model(), batch_norm)
    first = ours.step(feeds(), fetch=["y"]).outputs["y"]
    np.testing.assert_allclose(first, inferred(model(), feeds()), rtol=1e-5, atol=1e-6)
    assert "mean" not in ours.state_dict()


def test_false_keeps_the_statistics_of_a_training_form() -> None:
    ours = session(model(training=True), False)
    first = ours.step(feeds(), fetch=["y"]).outputs["y"]
    np.testing.assert_allclose(first, inferred(model(), feeds()), rtol=1e-5, atol=1e-6)
    held = {t.name: numpy_helper.to_array(t) for t in model().graph.initializer}
    np.testing.assert_array_equal(ours.state_dict()["mean"], held["mean"])


@pytest.mark.parametrize("form", ["inference", "training", "kept", "aged"])
def test_verify_has_onnxruntime_normalize_alike(form: str) -> None:
    """onnxruntime writes into the statistics that it is given where a node is in training form."""
    batch_norm = {"inference": True, "training": None, "aged": True}.get(form, False)
    given = model(form in ("training", "kept"), opset=13 if form == "aged" else 17)
    ours = session(given, batch_norm)
    before = ours.state_dict()
    found = ours.verify(feeds())
    assert found.ok, found
    assert any("differences" in row.engine for row in found.rows)
    for name, x in ours.state_dict().items():
        np.testing.assert_array_equal(x, before[name], err_msg=name)
    ours.step(feeds())
    assert ours.verify(feeds(2)).ok


def chain(forms: tuple[bool, ...], rank: int, opset: int) -> onnx.ModelProto:
    """x f32[B,3,...] -> BatchNormalization for each form, True for training, all with the same
    statistics and a scale of their own -> y."""
    rng = np.random.default_rng(0)
    held = {"bias": 0.2 * rng.random(CHANNELS), "mean": 0.3 * rng.standard_normal(CHANNELS)}
    held["variance"] = 0.5 + rng.random(CHANNELS)
    nodes, last = [], "x"
    for i, trains in enumerate(forms):
        held[f"scale{i}"] = 1 + 0.1 * rng.standard_normal(CHANNELS)
        made = ["y" if i == len(forms) - 1 else f"n{i}"]
        settings: dict[str, Any] = {"epsilon": 1e-3}
        if trains:
            made += [f"mean{i}", f"variance{i}"]
            settings["training_mode"] = 1
        inputs = [last, f"scale{i}", "bias", "mean", "variance"]
        nodes.append(helper.make_node("BatchNormalization", inputs, made, **settings))
        last = made[0]
    return model_of(nodes, held, ["B", CHANNELS, *([4, 2][: rank - 2])], opset)


def by_pytorch(
    given: onnx.ModelProto, by_batch: list[bool], batches: list[dict[str, np.ndarray]]
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses and the weights of SGD. by_batch: of each node."""
    held = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in given.graph.initializer}
    weights = {n: torch.nn.Parameter(x) for n, x in held.items() if n not in ("mean", "variance")}
    optimizer, losses = torch.optim.SGD(weights.values(), lr=0.1), []
    for batch in batches:
        x = torch.tensor(batch["x"])
        mean, variance = held["mean"], held["variance"]
        over = [d for d in range(x.dim()) if d != 1]
        for i, trains in enumerate(by_batch):
            if trains:
                now = x.detach()
                held["mean"] = 0.9 * held["mean"] + 0.1 * now.mean(over)
                held["variance"] = 0.9 * held["variance"] + 0.1 * now.var(over, unbiased=False)
            x = torch.nn.functional.batch_norm(
                x, None if trains else mean, None if trains else variance, weights[f"scale{i}"],
                weights["bias"], training=trains, eps=1e-3,
            )  # fmt: skip
        exact = torch.nn.functional.mse_loss(x, torch.tensor(batch["labels"]))
        optimizer.zero_grad()
        exact.backward()
        optimizer.step()
        losses.append(exact.item())
    return losses, {n: x.detach().numpy() for n, x in (held | weights).items()}


@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("batch_norm", [None, True, False])
@pytest.mark.parametrize(
    ("forms", "opset"),
    [((False, True), 17), ((True, False), 17), ((False, True), 18), ((True, True), 21),
     ((False, False), 9), ((False, False), 11), ((False, False), 18)],
)  # fmt: skip
def test_each_node_normalizes_by_its_own_form(
    forms: tuple[bool, ...], opset: int, batch_norm: bool | None, rank: int
) -> None:
    """Also where nodes of both forms share their statistics."""
    given, rng = chain(forms, rank, opset), np.random.default_rng(5)
    sizes = (ROWS, CHANNELS, *(4, 2)[: rank - 2])
    batches = [
        {n: (1 + rng.standard_normal(sizes)).astype(np.float32) for n in ("x", "labels")}
        for _ in range(3)
    ]
    ours = session(given, batch_norm)
    found = ours.verify(batches[0])
    assert found.ok, found
    by_batch = [batch_norm is True or (form and batch_norm is None) for form in forms]
    losses, weights = by_pytorch(given, by_batch, batches)
    np.testing.assert_allclose([ours.step(batch).loss for batch in batches], losses, rtol=2e-5)
    for name, x in ours.state_dict().items():
        np.testing.assert_allclose(x, weights[name], rtol=2e-5, atol=1e-6, err_msg=name)
    assert ours.verify(batches[1]).ok


def test_a_run_goes_on_with_its_statistics(tmp_path: Path) -> None:
    whole, first = session(model(), True), session(model(), True)
    for i in range(4):
        whole.step(feeds(i))
    for i in range(2):
        first.step(feeds(i))
    first.save(tmp_path)
    second = session(model(), True)
    second.resume(tmp_path)
    for i in range(2, 4):
        second.step(feeds(i))
    for name, x in whole.state_dict().items():
        np.testing.assert_array_equal(second.state_dict()[name], x, err_msg=name)


def test_a_window_moves_the_statistics_with_each_batch() -> None:
    ours, theirs = session(model(), True, gradient_accumulation_steps=2), Reference(0.9)
    for i in range(2):
        ours.step(feeds(i))
        theirs(torch.tensor(feeds(i)["x"]))
    np.testing.assert_allclose(
        ours.state_dict()["variance"], theirs.variance.numpy(), rtol=1e-5, atol=1e-6
    )


def test_a_gradient_that_is_not_finite_leaves_the_statistics() -> None:
    ours = session(model(), True)
    before, batch = ours.state_dict(), feeds()
    batch["labels"][0, 0, 0] = np.inf
    assert ours.step(batch).skipped
    for name, x in ours.state_dict().items():
        np.testing.assert_array_equal(x, before[name])


def test_a_model_without_such_nodes_is_refused() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 3])
    weight = numpy_helper.from_array(np.ones((3, 3), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weight]
    )
    given = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(OnwardError, match="batch_norm=True, and no BatchNormalization"):
        session(given, True)


def test_the_exported_step_moves_them_too(tmp_path: Path) -> None:
    ours = session(model(), True)
    ours.step(feeds(0))
    folder = ours.export_training(tmp_path / "step")
    losses, state = run(folder, [feeds(i) for i in range(1, 4)])
    expected = [ours.step(feeds(i)).loss for i in range(1, 4)]
    expected.append(ours.evaluate(feeds(3)).loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    found = load_file(state)
    for name in ("mean", "variance"):
        np.testing.assert_allclose(found[f"buffer.{name}"], ours.state_dict()[name], rtol=1e-5)


def dense(held: dict[str, np.ndarray], names: list[str], opset: int = 17) -> onnx.ModelProto:
    """x f32[B,3] -> BatchNormalization with these inputs -> y."""
    node = helper.make_node("BatchNormalization", ["x", *names], ["y"])
    return model_of([node], held, ["B", CHANNELS], opset)


HELD = {
    "scale": np.array([1.1, 0.9, 1.3]), "bias": np.array([0.1, 0.2, -0.3]),
    "mean": np.array([0.5, 0.1, 0.2]), "variance": np.array([1.0, 2.0, 0.5]),
}  # fmt: skip


@pytest.mark.parametrize("form", ["function", "identity"])
def test_statistics_behind_a_function_or_an_identity_are_not_weights(form: str) -> None:
    given = dense(HELD, [*HELD])
    if form == "function":
        parts = ["x", *HELD]
        made = helper.make_function(
            "my", "Norm", parts, ["y"], [helper.make_node("BatchNormalization", parts, ["y"])],
            [helper.make_opsetid("", 17)],
        )  # fmt: skip
        given.functions.append(made)
        given.opset_import.append(helper.make_opsetid("my", 1))
        given.graph.node[0].op_type, given.graph.node[0].domain = "Norm", "my"
    else:
        given.graph.node.insert(0, helper.make_node("Identity", ["mean"], ["mean_2"]))
        given.graph.node[1].input[3] = "mean_2"
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, CHANNELS)).astype(np.float32)
    batch = {"x": x, "labels": np.zeros_like(x)}
    assert set(session(given).state_dict()) == {"scale", "bias"}
    kept, moving = session(dense(HELD, [*HELD]), True), session(given, True)
    losses = [(kept.step(batch).loss, moving.step(batch).loss) for _ in range(2)]
    assert losses[0][0] == losses[0][1] and losses[1][0] == losses[1][1]
    for name, array in kept.state_dict().items():
        np.testing.assert_array_equal(moving.state_dict()[name], array)
    assert moving.verify(batch).ok


def test_the_training_form_of_opset_13_has_more_results() -> None:
    given = dense(HELD, [*HELD], 13)
    given.graph.node[0].output.extend(["mean_1", "variance_1", "mean_2", "variance_2"])
    x = np.random.default_rng(0).standard_normal((ROWS, CHANNELS)).astype(np.float32)
    batch = {"x": x, "labels": np.zeros_like(x)}
    ours, want = session(given), session(dense(HELD, [*HELD]), True)
    for _ in range(3):
        assert ours.step(batch).loss == want.step(batch).loss
    assert {"mean", "variance"} < set(ours.state_dict())
    assert ours.verify(batch).ok


def test_a_statistic_that_is_another_tensor_too_is_refused() -> None:
    held = {"ones": np.ones(CHANNELS), "zeros": np.zeros(CHANNELS)}
    with pytest.raises(OnwardError, match=r"is also another tensor: ones, zeros; exporters"):
        session(dense(held, ["ones", "zeros", "zeros", "ones"]), True)
