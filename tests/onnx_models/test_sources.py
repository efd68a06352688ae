"""What is read of an ONNX file: weights, settings, sizes, old forms; and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
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


CUTS = [
    (0, 5), (0, 4), (-4, 2**63 - 1), (-4, 10**9), (5, 2**31 - 1), (0, -4), (-100, 2), (1, 5),
    (-4, -1), (3, 1), (1, 2**60), (-(2**63), -1), (0, 2**60), (0, 2), (2, 2),
]  # fmt: skip
OPEN = CUTS[-5:]  # that are the same for all sizes from 2 on


def cut(start: int, end: int) -> onnx.ModelProto:
    return parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    m (float[B, T, 4] x) => (float[B, R, 4] y) {{
        s = Constant <value_ints = [{start}]> () e = Constant <value_ints = [{end}]> ()
        a = Constant <value_ints = [1]> () y = Slice (x, s, e, a)
    }}""")


@pytest.mark.parametrize(("start", "end"), CUTS)
def test_a_cut_of_an_open_size_ends_where_the_batch_does(start: int, end: int) -> None:
    model = cut(start, end)
    session = TrainingSession(model)
    rng = np.random.default_rng(0)
    for length in (7, 4, 2, 7):
        x = rng.standard_normal((2, length, 4)).astype(np.float32)
        np.testing.assert_array_equal(session.predict({"x": x})["y"], stock(model, {"x": x}))
    assert session.source.is_open
    assert (len(session.module.program.graphs) == 1) == ((start, end) in OPEN)


@pytest.mark.parametrize(("start", "end"), CUTS)
def test_the_shape_of_a_cut_whose_elements_nothing_reads(start: int, end: int) -> None:
    """Along both dims, where a batch of one row or step makes sums of nothing too."""
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    m (float[B, T, 4] x) => (float[R, S, 4] y, float[R, 4] z) {{
        s = Constant <value_ints = [{start}, {start}]> ()
        e = Constant <value_ints = [{end}, {end}]> ()
        a = Constant <value_ints = [0, 1]> () c = Slice (x, s, e, a)
        h = Shape (c) y = ConstantOfShape (h)
        d = Constant <value_ints = [1]> () z = ReduceSum <keepdims = 0> (c, d)
    }}""")
    session, rng = TrainingSession(model), np.random.default_rng(0)
    for rows, length in ((7, 7), (2, 1), (1, 3), (3, 2), (6, 2), (2, 6)):
        x = rng.standard_normal((rows, length, 4)).astype(np.float32)
        run = onnxruntime.InferenceSession(model.SerializeToString()).run
        y, z = map(np.asarray, run(None, {"x": x}))
        found = session.predict({"x": x})
        np.testing.assert_array_equal(found["y"], y)
        np.testing.assert_allclose(found["z"], z, atol=1e-6)


def test_a_step_on_batches_shorter_than_a_cut() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    m (float[B, T, 4] x) => (float l)
    <float[4, 3] w = {1, -2, 3, 1, 2, -1, 0.5, 1, 1, 2, 0.25, 3}, int64[1] s = {0},
     int64[1] e = {3}, int64[1] a = {1}> {
        c = Slice (x, s, e, a) p = MatMul (c, w) q = Mul (p, p)
        l = ReduceMean <keepdims = 0> (q)
    }"""
    session = TrainingSession(parser.parse_model(text), onward.optim.SGD(lr=0.01), "l")
    rng = np.random.default_rng(0)
    for length in (5, 2, 1):
        x = rng.standard_normal((2, length, 4)).astype(np.float32)
        w = torch.tensor(session.state_dict()["w"], requires_grad=True)
        loss_ = (torch.from_numpy(x)[:, :3] @ w).square().mean()
        loss_.backward()  # type: ignore[no-untyped-call]
        assert session.step({"x": x}).loss == pytest.approx(loss_.item(), rel=1e-5)
        assert w.grad is not None
        after = (w - 0.01 * w.grad).detach().numpy()
        np.testing.assert_allclose(session.state_dict()["w"], after, rtol=1e-5)


@pytest.mark.parametrize(("start", "count"), [(0, 2), (3, 4)])
def test_a_table_that_is_cut_at_an_open_size(start: int, count: int) -> None:
    """The cut of a table of positions is no longer than the table."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    m (float[B, T] x) => (float[R] y) <float[4] table = {{1, 2, 3, 4}}, int64[1] o = {{0}}> {{
        t = Shape <start = 1> (x) s = Constant <value_ints = [{start}]> ()
        e = Add (t, s) y = Slice (table, s, e, o)
    }}"""
    model = parser.parse_model(text)
    session = TrainingSession(model)
    for length in (3, 6):
        x = np.ones((2, length), np.float32)
        np.testing.assert_array_equal(session.predict({"x": x})["y"], stock(model, {"x": x}))


UNLIKE = {
    "y = Squeeze (x, one)": (1, "dim 1 of f32.* is not 1"),
    "y, z = Split <axis = 1> (x, parts)": (3, "its parts .1, 2. are not the"),
    "y, i = TopK <axis = 1> (x, five)": (6, "it takes 5 of"),
    "y = Concat <axis = 2> (x, v)": (3, "differ in more than dim 2"),
    "y = Pad (x, cut)": (5, "it cuts 4 of the"),
}


@pytest.mark.parametrize("line", UNLIKE)
def test_sizes_that_a_node_does_not_take_are_refused(line: str) -> None:
    """onnxruntime takes the one size."""
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    m (float[B, T, 4] x) => (float[] y)
    <int64[1] one = {{1}}, int64[2] parts = {{1, 2}}, int64[1] five = {{5}},
     float[2, 3, 1] v = {{1, 2, 3, 4, 5, 6}}, int64[6] cut = {{0, -2, 0, 0, -2, 0}}> {{
        {line}
    }}""")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    session = TrainingSession(model)
    taken, message = UNLIKE[line]
    for length in (2, 3, taken):
        x = np.random.default_rng(length).random((2, length, 4)).astype(np.float32)
        if length == taken:
            np.testing.assert_array_equal(session.predict({"x": x})["y"], stock(model, {"x": x}))
        else:
            with pytest.raises(OnwardError, match=message):
                session.predict({"x": x})


def test_a_dim_that_is_dropped_without_its_name() -> None:
    model = cut(1, 2**60)
    model.graph.node[-1].output[0] = "z"
    model.graph.node.append(onnx.helper.make_node("Squeeze", ["z"], ["y"]))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    session = TrainingSession(model)
    for length in (5, 2):  # x[:, 1:] has one step at T = 2
        x = np.ones((2, length, 4), np.float32)
        found = session.predict({"x": x})["y"]
        np.testing.assert_array_equal(found, stock(model, {"x": x}))


def test_a_loss_that_cuts_more_than_a_batch_has_is_refused() -> None:
    model = cut(0, 2**60)
    model.graph.initializer.append(numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    model.graph.node[-1].output[0] = "z"
    model.graph.node.append(onnx.helper.make_node("MatMul", ["z", "w"], ["y"]))

    def head(b: Any, y: Any) -> Any:
        return b.ReduceMean(b.slice(y, 1, 0, 4), keepdims=0)

    session = TrainingSession(model, onward.optim.SGD(lr=0.1), loss.function(head))
    x = np.ones((2, 6, 4), np.float32)
    assert session.evaluate({"x": x}).loss == pytest.approx(1.0)
    with pytest.raises(OnwardError, match=r"the loss cuts more than .* has \(x \[2, 3, 4\]\)"):
        session.evaluate({"x": x[:, :3]})


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


APART = {
    "two names": ("x [B, 4], z [N, 4]", "q = Add (x, z) y = MatMul (q, w)"),
    "no names": ("x [, 4], z [, 4]", "q = Add (x, z) y = MatMul (q, w)"),
    "an open width": ("x [B, F]", "y = MatMul (x, w)"),
    "a width of a Gemm": ("x [B, F]", "y = Gemm (x, w, v)"),
    "a width of a norm": ("x [B, F]", "q = LayerNormalization (x, u) y = MatMul (q, w)"),
    "a width of a batch norm": (
        "x [B, F]", "q = BatchNormalization (x, u, u, u, u) y = MatMul (q, w)",
    ),
    "a factor": ("x [B, F]", "q = Mul (x, u) y = MatMul (q, w)"),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_sizes_that_only_a_batch_shows_to_be_equal(name: str) -> None:
    given, lines = APART[name]
    inputs = ", ".join(
        f"float{x[1:].strip()} {x[0]}" for x in given.replace("], ", "]; ").split("; ")
    )
    text = f"""<ir_version: 10, opset_import: ["" : 21]> m ({inputs}) => (float[M, 3] y)
    <float[4, 3] w = {{1, -2, 3, 1, 2, -1, 0.5, 1, 1, 2, 0.25, 3}}, float[4] u = {{1, 2, 3, 4}},
     float[3] v = {{1, 2, 3}}> {{ {lines} }}"""
    model = parser.parse_model(text.replace("[, 4]", "[?, 4]"))
    session = TrainingSession(model)
    rng = np.random.default_rng(0)
    for rows in (3, 2):
        feeds = {n: rng.standard_normal((rows, 4)).astype(np.float32) for n in session.inputs}
        want = stock(model, feeds)
        np.testing.assert_allclose(session.predict(feeds)["y"], want, rtol=1e-5, atol=1e-6)


def test_an_input_without_a_shape_is_refused() -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> m (float[] x) => (float[] y) { y = Exp (x) }'
    with pytest.raises(OnwardError, match="the input x has no shape; fix: give it one"):
        TrainingSession(parser.parse_model(text))


FUNCTION = """<ir_version: 9, opset_import: ["" : 20, "my" : 1]>
m (float[B, 4] x) => (float[B, 3] y) <float[4, 3] w = {1, -2, 3, 1, 2, -1, 0.5, 1, 1, 2, 0.25, 3}>
{ p = MatMul (x, w) CALL }
<domain: "my", opset_import: ["" : OWN, "my" : 1]>
Outer (x) => (y) { z = my.Sloped (x) y = Identity (z) }
<domain: "my", opset_import: ["" : OWN]>
Sloped <alpha: float = 0.3> (x) => (y) { y = LeakyRelu <alpha: float = @alpha> (x) }
"""


@pytest.mark.parametrize("own", [20, 18])
@pytest.mark.parametrize(
    "call", ["y = my.Sloped (p)", "y = my.Sloped <alpha = 0.7> (p)", "y = my.Outer (p)"]
)
def test_a_function_keeps_the_defaults_of_its_attributes(call: str, own: int) -> None:
    """Also one of another opset in which its ops are the same."""
    model = parser.parse_model(FUNCTION.replace("CALL", call).replace("OWN", str(own)))
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    found = TrainingSession(model).predict({"x": x})["y"]
    np.testing.assert_allclose(found, stock(model, {"x": x}), rtol=1e-5, atol=1e-6)


def test_a_function_whose_opset_has_other_forms_is_refused() -> None:
    text = FUNCTION.replace("CALL", "y = my.Outer (p)").replace("OWN", "13")
    model = parser.parse_model(text.replace("Identity (z)", "ReduceMean <axes = [1]> (z)"))
    message = r"the function Outer of opset 13 in a model of opset 20, since ReduceMean differs"
    with pytest.raises(OnwardError, match=message):
        TrainingSession(model)


OLD = [
    (7, "y = Upsample <mode = \"MODE\", scales = [1.0, 1.0, A, B]> (x)"),
    (9, "y = Upsample <mode = \"MODE\"> (x, s)"), (10, "y = Resize <mode = \"MODE\"> (x, s)"),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(("opset", "line"), OLD)
def test_interpolation_of_old_opsets(opset: int, line: str, mode: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 5)).astype(np.float32)
    for a, b in ((2.0, 2.0), (1.6, 2.5), (0.6, 1.7)):
        if (a < 1 or opset == 7) and (a < 1) != (opset == 10):
            continue  # Upsample does not shrink
        text = f"""<ir_version: 6, opset_import: ["" : {opset}]>
        m (float[1, 2, 4, 5] x) => (float[N, C, H, W] y) <float[4] s = {{1, 1, {a}, {b}}}> {{
            {line}
        }}"""
        text = text.replace("MODE", mode).replace("A,", f"{a},").replace("B]", f"{b}]")
        model = parser.parse_model(text)
        found = TrainingSession(model).predict({"x": x})["y"]
        np.testing.assert_allclose(found, stock(model, {"x": x}), atol=1e-5, err_msg=str((a, b)))


@pytest.mark.parametrize("axis", [0, 1, 2, None])
def test_hardmax_of_old_opsets_takes_dims_as_one(axis: int | None) -> None:
    given = "" if axis is None else f"<axis = {axis}>"
    model = parser.parse_model(f"""<ir_version: 6, opset_import: ["" : 11]>
    m (float[2, 3, 4] x) => (float[2, 3, 4] y) {{ y = Hardmax {given} (x) }}""")
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    np.testing.assert_array_equal(
        TrainingSession(model).predict({"x": x})["y"], stock(model, {"x": x})
    )


@pytest.mark.parametrize("line", ["s = Concat <axis = 0> (a, b)", "s = Identity (whole)"])
def test_settings_that_nodes_hand_on(line: str) -> None:
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
    m (float[1, 2, 3, 3] x) => (float[1, 2, 6, 6] y)
    <float[2] a = {{1, 1}}, float[2] b = {{2, 2}}, float[4] whole = {{1, 1, 2, 2}},
     float[2, 1, 1] w = {{3, 4}}> {{ {line} z = Resize (x, , s) y = Mul (z, w) }}""")
    session = TrainingSession(model)
    assert set(session.state_dict()) == {"w"} | ({"whole"} if "Concat" in line else {"a", "b"})
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 3)).astype(np.float32)
    np.testing.assert_allclose(session.predict({"x": x})["y"], stock(model, {"x": x}), rtol=1e-6)


def test_a_mean_of_whole_numbers_is_refused() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> m (int64[B, 3] x) => (int64[1, 1] y)
    { y = ReduceMean (x) }"""
    with pytest.raises(OnwardError, match=r"ReduceMean of i64\[B,3\] is not supported; fix: cast"):
        TrainingSession(parser.parse_model(text))


@pytest.mark.parametrize("mask", ["m", ""])
def test_a_dropout_whose_mask_nothing_reads(mask: str) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> m (float[B, 4] x) => (float[B, 4] y)
    <float[4] w = {1, 2, 3, 4}, float r = {0.5}, bool t = {1}> {
        z = Mul (x, w) y = Dropout (z, r, t)
    }"""
    model = parser.parse_model(text)
    model.graph.node[-1].output.append(mask)
    session = TrainingSession(model, onward.optim.SGD(lr=0.0), loss.mse("y"))
    x = np.ones((64, 4), np.float32)
    feeds = {"x": x, "labels": np.zeros_like(x)}
    dropped = session.step(feeds, fetch=["y"]).outputs["y"]
    assert 0.2 < (dropped == 0).mean() < 0.8
    np.testing.assert_array_equal(session.predict({"x": x})["y"], [[1, 2, 3, 4]] * 64)
    if mask:
        read = onnx.helper.make_node("Cast", ["m"], ["k"], to=1)
        model.graph.node.append(read)
        model.graph.output[0].name = "k"
        with pytest.raises(OnwardError, match="its input m is a result that is not supported"):
            TrainingSession(model)
