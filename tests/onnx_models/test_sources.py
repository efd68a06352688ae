"""What is read of an ONNX file: weights, settings, sizes, old forms; and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

import onward
from onward import TrainingSession, loss
from onward.errors import OnwardError
from onward.onnx_models import OnnxSource

IMAGES = """
<ir_version: 8, opset_import: ["" : OPSET]>
images (float[B, 3, H, W] x) => (float[B, 4] y)
{
    c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w, b)
    n = BatchNormalization (c, scale, bias, mean, var)
    r = Clip (n, low, high)
    u = Resize <mode = "nearest"> (r, roi, scales)
    p = GlobalAveragePool (u)
    f = Flatten (p)
    y = MatMul (f, head)
}
"""
ARRAYS: dict[str, Any] = {
    "w": (4, 3, 3, 3), "b": (4,), "scale": (4,), "bias": (4,), "mean": (4,), "var": (4,),
    "head": (4, 4),
}  # fmt: skip
TRAINED = {"w", "b", "scale", "bias", "head"}


def images(opset: int = 13) -> onnx.ModelProto:
    """A model whose convolution needs fixed sizes, with statistics and settings of f32."""
    model, rng = parser.parse_model(IMAGES.replace("OPSET", str(opset))), np.random.default_rng(0)
    arrays = {n: rng.standard_normal(s).astype(np.float32) / 2 for n, s in ARRAYS.items()}
    arrays["var"] = np.abs(arrays["var"]) + 1
    arrays |= {"roi": np.zeros(0, np.float32), "scales": np.array([1, 1, 2, 2], np.float32)}
    arrays |= {"low": np.array(-0.5, np.float32), "high": np.array(6, np.float32)}
    for name, array in arrays.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.checker.check_model(model)
    return model


def stock(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    found: Any = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    return found


@pytest.mark.parametrize("opset", [11, 12, 13, 18])
def test_a_model_that_needs_fixed_sizes_is_read_for_each_batch(opset: int) -> None:
    model = images(opset)
    session = TrainingSession(model, onward.optim.SGD(lr=0.1), loss.mse("y"))
    assert not session.source.is_open
    assert session.inputs == {"x": "f32[B,3,H,W]"}
    rng = np.random.default_rng(1)
    for sizes in ((2, 3, 8, 8), (1, 3, 6, 10), (2, 3, 8, 8)):
        x = rng.standard_normal(sizes).astype(np.float32)
        expected = stock(session.export_onnx(), {"x": x})
        np.testing.assert_allclose(session.predict({"x": x})["y"], expected, atol=1e-5)
        target = np.ones((sizes[0], 4), np.float32)
        found = session.step({"x": x, "labels": target}).loss
        assert found == pytest.approx(((expected - 1) ** 2).mean(), rel=1e-4)


def test_sizes_that_predict_has_seen_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared for the last sizes stays."""
    monkeypatch.setattr("onward.training_session.session.KEPT", 2)
    session = TrainingSession(images())
    for height in (4, 6, 4, 8):
        session.predict({"x": np.zeros((1, 3, height, 8), np.float32)})
    assert len(session._predictions) == 2
    held = [step.padded for step in session._predictions]
    session.predict({"x": np.zeros((1, 3, 4, 8), np.float32)})
    assert held[0] is session._predictions[1].padded


def test_statistics_and_settings_are_not_trained() -> None:
    session = TrainingSession(images(), onward.optim.SGD(lr=0.1), loss.mse("y"))
    assert set(session.state_dict()) == TRAINED
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    before = {t.name: t.SerializeToString() for t in images().graph.initializer}
    session.step({"x": x, "labels": np.ones((2, 4), np.float32)})
    after = {t.name: t.SerializeToString() for t in session.export_onnx().graph.initializer}
    assert {n for n in before if before[n] != after[n]} == TRAINED


def test_the_gradient_of_every_weight_is_that_of_differences() -> None:
    """A step of SGD moves a weight by its gradient; onnxruntime's losses tell what that is."""
    model = images()
    x = np.random.default_rng(1).standard_normal((2, 3, 6, 6)).astype(np.float32)
    session = TrainingSession(model, onward.optim.SGD(lr=1.0), loss.mse("y"))
    weights = session.state_dict()
    session.step({"x": x, "labels": np.zeros((2, 4), np.float32)})
    moved = {n: (weights[n] - a).astype(np.float64) for n, a in session.state_dict().items()}

    def at(name: str, change: np.ndarray) -> float:
        probe = TrainingSession(model)
        probe.load_state_dict({**weights, name: (weights[name] + change).astype(np.float32)})
        y = stock(probe.export_onnx(), {"x": x}).astype(np.float64)
        return float((y**2).mean())

    rng = np.random.default_rng(2)
    for name in TRAINED:
        direction = rng.standard_normal(weights[name].shape)
        difference = (at(name, 1e-2 * direction) - at(name, -1e-2 * direction)) / 2e-2
        assert (moved[name] * direction).sum() == pytest.approx(difference, rel=2e-2, abs=1e-4), (
            name
        )


def test_sizes_that_do_not_fit_are_refused() -> None:
    session = TrainingSession(images(), onward.optim.SGD(lr=0.1), loss.mse("y"))
    for shape in ((2, 4, 8, 8), (2, 3, 8)):
        with pytest.raises(OnwardError, match=r"the input x is f32\[B,3,H,W\], and the batch has"):
            session.predict({"x": np.zeros(shape, np.float32)})


REFUSED = {
    "s = ReduceMax <keepdims = 0> (x) k = Constant <value_float = 0.0> () go = Greater (s, k) "
    "y = If (go) <then_branch: graph = yes () => (float[B] a) { a = Exp (x) }, "
    "else_branch: graph = no () => (float[B] a) { a = Neg (x) }>": "If needs a constant",
    "y = RandomNormalLike (x)": "it draws random numbers",
    "y = ai.other.Op (x)": "its domain ai.other is not",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_no_graph_can_hold_names_its_node(line: str) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21, "ai.other" : 1]>\n'
    text += f"model (float[B] x) => (float[B] y) {{ {line} }}"
    with pytest.raises(OnwardError, match=REFUSED[line]) as caught:
        session = TrainingSession(parser.parse_model(text))
        session.predict({"x": np.zeros(2, np.float32)})
    assert str(caught.value).startswith("this ONNX model cannot read ")


def test_a_model_without_weights_cannot_be_trained() -> None:
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> m (float[B] x) => (float[B] y) { y = Exp (x) }'
    )
    model = parser.parse_model(text)
    with pytest.raises(OnwardError, match="has no weights of f32 to train"):
        TrainingSession(model, onward.optim.SGD(lr=0.1), loss.mse("y"))
    with pytest.raises(OnwardError, match="only predicts"):
        TrainingSession(model).step({"x": np.zeros(2, np.float32)})
    x = np.array([0.5, 1.0], np.float32)
    np.testing.assert_allclose(TrainingSession(model).predict({"x": x})["y"], np.exp(x), rtol=1e-6)


@pytest.mark.parametrize("name", ["?", "-1", "", "p2o.DynamicDimension.0"])
def test_names_of_sizes_as_tools_write_them(name: str) -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[B, 2] x) => (float[B, 2] y) '
        "{ y = Mul (x, w) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "w"))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = name
    source = OnnxSource.of(model)
    assert source.is_open
    (size, two) = source.inputs["x"].shape
    assert two == 2 and str(size).isidentifier()
    session = TrainingSession(model)
    for rows in (1, 3):
        assert session.predict({"x": np.ones((rows, 2), np.float32)})["y"].shape == (rows, 2)
