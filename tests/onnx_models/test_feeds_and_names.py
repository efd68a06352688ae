"""Arrays that a session is fed, and names that models give their inputs, weights and outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

import onward
from onward import TrainingSession, loss
from onward.errors import OnwardError
from onward.recipes.onnx_subject import loss_of

RNG = np.random.default_rng(0)
W = RNG.standard_normal((4, 3)).astype(np.float32)
B = RNG.standard_normal(3).astype(np.float32)
X = RNG.standard_normal((5, 4)).astype(np.float32)
Y = RNG.standard_normal((5, 3)).astype(np.float32)


def model(text: str, **arrays: np.ndarray) -> onnx.ModelProto:
    """The model of a graph's text, with initializers."""
    made = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]>\n{text}')
    for name, array in arrays.items():
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def linear() -> onnx.ModelProto:
    text = "m (float[N, 4] x) => (float[N, 3] y) { a = MatMul (x, w) y = Add (a, b) }"
    return model(text, w=W, b=B)


def session_of(file: onnx.ModelProto, loss: Any = None, **options: Any) -> TrainingSession:
    return TrainingSession(
        file, onward.optim.SGD(lr=0.1), loss or onward.loss.mse("y"), options=options
    )


def stock(file: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Any:
    return onnxruntime.InferenceSession(file.SerializeToString()).run(None, feeds)[0]


# ---- labels


NARROW = "m (float[N, 4] x) => (float[N, 1] y) { y = MatMul (x, w) }"


def test_a_target_of_another_shape_than_the_output_is_refused() -> None:
    """Sub would broadcast it."""
    file = model(NARROW, w=W[:, :1])
    said = r"the loss takes 'x' as f32\[N,1\], and the model's input of that name is f32\[N,4\]"
    for made in (loss.mse("y", target="x"), loss.l1("y", "x"), loss.bce_with_logits("y", "x")):
        with pytest.raises(OnwardError, match=said):
            session_of(file, made)


def test_an_input_of_the_outputs_type_is_a_target() -> None:
    text = "m (float[N, 4] x) => (float[N, 4] y) { y = MatMul (x, w) }"
    w = np.eye(4, dtype=np.float32) * 0.5
    found = session_of(model(text, w=w), loss.mse("y", target="x")).step({"x": X}).loss
    assert found == pytest.approx(float(np.mean((X @ w - X) ** 2)), rel=1e-5)


@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_classes_that_are_an_input_are_a_target_where_they_have_its_dtype(kind: str) -> None:
    text = f"""m (float[N, 4] x, {kind}[N] classes) => (float[N, 3] y, {kind}[N] same)
    {{ y = MatMul (x, w) same = Identity (classes) }}"""
    file, made = model(text, w=W), loss.cross_entropy("y", target="classes")
    if kind == "int32":
        with pytest.raises(OnwardError, match=r"takes 'classes' as i64\[N\], and .* is i32\[N\]"):
            session_of(file, made)
        return
    classes = np.array([0, 1, 2, 1, 0])
    want = torch.nn.functional.cross_entropy(torch.from_numpy(X @ W), torch.from_numpy(classes))
    found = session_of(file, made).step({"x": X, "classes": classes}).loss
    assert found == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize("shape", [(5,), (5, 4), (4, 3), (5, 3, 1)])
def test_labels_of_another_shape_are_named_with_the_one_they_need(shape: tuple[int, ...]) -> None:
    session = session_of(linear())
    said = rf"labels is \[{', '.join(map(str, shape))}\], and the loss takes f32\[N,3\], which is "
    for _ in range(2):  # the second time beside a captured step
        for call in (session.step, session.evaluate):
            with pytest.raises(OnwardError, match=said + r"\[5, 3\] for this batch"):
                call({"x": X, "labels": np.zeros(shape, np.float32)})
        session.step({"x": X, "labels": Y})


# ---- arrays


WHOLE = "m (uint8[N] i) => (uint8[N] y) { y = Identity (i) }"


@pytest.mark.parametrize(
    ("kind", "array", "said"),
    [
        ("uint8", np.array([3, -1], np.int8), "i holds -1, and .* uint8, from 0 to 255; fix"),
        ("uint8", np.array([256, 1]), "i holds 256, "),
        ("int64", np.array([2**64 - 1, 0], np.uint64), "i holds 18446744073709551615, "),
        ("int8", np.array([200], np.uint8), "i holds 200, .* from -128 to 127"),
        ("float16", np.array([1, 1e6], np.float32), r"i holds 1000000.0, .* to 65504"),
        ("float", np.array([-1e300, 1]), "i holds -1e.300, "),
    ],
)
def test_numbers_that_the_inputs_dtype_lacks_are_refused(
    kind: str, array: np.ndarray, said: str
) -> None:
    session = TrainingSession(model(WHOLE.replace("uint8", kind)))
    with pytest.raises(OnwardError, match=said):
        session.predict({"i": array})


@pytest.mark.parametrize(
    ("kind", "array"),
    [
        ("uint8", np.array([0, 255])),
        ("int8", np.array([-128, 127], np.int64)),
        ("float16", np.array([65504.0, np.inf, -np.inf], np.float32)),
        ("float", np.array([np.inf, np.nan, 0.1])),
        ("uint8", np.array([], np.int64)),
    ],
)
def test_numbers_at_the_ends_of_a_range_stay(kind: str, array: np.ndarray) -> None:
    found = TrainingSession(model(WHOLE.replace("uint8", kind))).predict({"i": array})["y"]
    np.testing.assert_array_equal(found, array.astype(found.dtype))


def test_arrays_of_any_order_and_stride_are_read() -> None:
    packed = np.zeros(5, [("flag", "i1"), ("x", "f4", 4)])  # its strides are no whole numbers
    packed["x"] = X
    forms = {
        "backwards": X[::-1], "big-endian": X.astype(">f4"), "turned": X.T.copy().T,
        "every second": np.repeat(X, 2, 0)[::2], "of a record": packed["x"],
        "mirrored": X[:, ::-1], "nested lists": X.tolist(),
    }  # fmt: skip
    session = TrainingSession(linear())
    for form, x in forms.items():
        want = stock(linear(), {"x": np.array(x, np.float32)})
        np.testing.assert_allclose(session.predict({"x": x})["y"], want, atol=1e-5, err_msg=form)


# ---- names


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3}])
def test_an_input_may_be_named_as_a_weights_own_input(options: dict[str, Any]) -> None:
    """Losses are those of the model with another name; a window that ends early too."""
    text = linear().SerializeToString().replace(b"\x01x", b"\x01i")
    plain = onnx.ModelProto.FromString(text)
    for name in ("param.w", "param.b", "buffer.w"):
        file = onnx.ModelProto.FromString(text)
        file.graph.input[0].name = file.graph.node[0].input[0] = name
        session, other = session_of(file, **options), session_of(plain, **options)
        for _ in range(2):
            found = session.step({name: X, "labels": Y}).loss
            assert found == other.step({"i": X, "labels": Y}).loss
        session.update()
        other.update()
        for key, array in other.state_dict().items():
            np.testing.assert_array_equal(session.state_dict()[key], array)
        trained = session.export_onnx()
        np.testing.assert_allclose(
            stock(trained, {name: X}), session.predict({name: X})["y"], atol=1e-5
        )


BRACKETS = "m (float[N, 4] x) => (float[N, 3] y) { a = MatMul (x, w) y = Add (a, c) }"


def bracketed() -> onnx.ModelProto:
    """A model with the weights `w[0]` and `w0`, and the values `y[0]` and `y0`."""
    file = model(BRACKETS, w=W, c=B)
    names = {"w": "w[0]", "c": "w0", "a": "y[0]"}
    for tensor in file.graph.initializer:
        tensor.name = names[tensor.name]
    for node in file.graph.node:
        node.input[:] = [names.get(n, n) for n in node.input]
        node.output[:] = [names.get(n, n) for n in node.output]
    return file


def test_a_name_that_looks_like_a_pattern_is_a_name_first() -> None:
    sgd, mse = onward.optim.SGD(lr=0.1), loss.mse("y")
    session = TrainingSession(bracketed(), sgd, mse, trainable=["w[0]"])
    before = session.state_dict()
    session.step({"x": X, "labels": Y})
    after = session.state_dict()
    assert {n for n in before if not np.array_equal(before[n], after[n])} == {"w[0]"}
    session = TrainingSession(bracketed(), sgd, mse, trainable=["w[01]"])
    assert [p.requires_grad for p in session.module.parameters()] == [False, True]
    held = TrainingSession(bracketed(), sgd, mse, dropout={"y[0]": 0.5}).source.model
    assert [n.input[0] for n in held.graph.node if n.op_type == "Dropout"] == ["y[0]"]


def test_verify_takes_a_name_that_looks_like_a_pattern() -> None:
    session = session_of(bracketed())
    report = session.verify({"x": X, "labels": Y}, weights=["w[0]"])
    compared = {row.name for row in report.rows if "differences" in row.engine}
    assert report.ok and compared == {"grad.w[0]"}


def test_an_output_with_a_colon_may_be_the_loss() -> None:
    """TensorFlow names outputs `Identity:0`."""
    assert loss_of("Identity:0") == "Identity:0"
    assert loss_of("StatefulPartitionedCall:1") == "StatefulPartitionedCall:1"
    assert loss_of("mse:Identity:0") == loss.mse("Identity:0")
    with pytest.raises(OnwardError, match="cross_entropy"):
        loss_of("cross_entropi:logits")


# ---- state


TIED = """m (int64[N] i) => (float[N, 6] y)
{ h = Gather (table, i) y = MatMul (h, head) }"""


def test_a_tied_weight_takes_one_value() -> None:
    table = RNG.standard_normal((6, 4)).astype(np.float32)
    file = model(TIED, table=table, head=table.T.copy())
    session = session_of(file, loss.cross_entropy("y"))
    assert len(list(session.module.parameters())) == 1
    before = session.state_dict()
    with pytest.raises(OnwardError, match=r"table and head are one weight, .* given two values"):
        session.load_state_dict({"table": table + 1, "head": table.T + 2})
    for name, array in session.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    table[0, 0] = np.nan  # equals itself here
    session.load_state_dict({"table": table, "head": table.T})
    session.load_state_dict({"head": table.T + 3})
    np.testing.assert_array_equal(session.state_dict()["table"], table + 3)
