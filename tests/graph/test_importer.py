"""Models that are read: functions of their own, named sizes, branches, and what is refused; the
oracle is onnx's reference evaluator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, type_of
from onward.graph.importer import from_onnx

Execute = Callable[[Graph, dict[str, np.ndarray]], dict[str, np.ndarray]]

FUNCTIONS = """
<ir_version: 10, opset_import: ["" : 23, "own" : 1]>
model (float[B, 4] x, float[4] w) => (float[B, 4] y) {
    h = own.Scaled <times: float = 2.5> (x, w)
    y = own.Twice (h)
}
<domain: "own", opset_import: ["" : 23, "own" : 1]>
Scaled <times: float> (x, w) => (y) {
    t = Constant <value_float: float = @times> ()
    z = Mul (x, w)
    y = Mul (z, t)
}
<domain: "own", opset_import: ["" : 23]>
Twice (x) => (y) { y = Add (x, x) }
"""

BRANCH = """
<ir_version: 10, opset_import: ["" : 23]>
model (float[3] x, bool go) => (float[3] y) {
    y = If (go) <
        then_branch: graph = yes () => (float[3] a) { a = Exp (x) },
        else_branch: graph = no () => (float[3] a) { a = Neg (x) }
    >
}
"""


def read(text: str) -> onnx.ModelProto:
    model = parser.parse_model(text)
    onnx.checker.check_model(model)
    return model


def test_functions_of_a_model_are_inlined(execute: Execute) -> None:
    model, rng = read(FUNCTIONS.replace("B, 4", "3, 4")), np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in {"x": (3, 4), "w": 4}.items()}
    want: Any = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(execute(from_onnx(model), feeds)["y"], want[0], rtol=1e-6)


def test_named_sizes_stay_names_or_become_numbers() -> None:
    named = from_onnx(read(FUNCTIONS))
    assert str(type_of(named.outputs["y"])) == "f32[B,4]"
    fixed = from_onnx(read(FUNCTIONS), {"B": 7})
    assert str(type_of(fixed.outputs["y"])) == "f32[7,4]"


SHAPES = {
    "what is left": "s = Shape (x) z = Constant <value_ints: ints = [-1]> () "
    "n = Gather <axis = 0> (s, two) m = Unsqueeze (n, zero) t = Concat <axis = 0> (z, m) "
    "y = Reshape (x, t)",
    "a copied dim": "t = Constant <value_ints: ints = [0, -1]> () y = Reshape (x, t)",
    "expand, as exporters write it": "s = Shape (x) r = Shape (s) "
    "ones = ConstantOfShape <value = int64[1] {1}> (r) minus = Mul (ones, less) "
    "is = Equal (s, minus) t = Where (is, ones, s) y = Expand (one, t)",
    "a split along a fixed dim": "y, z = Split <axis = 2, num_outputs = 2> (x)",
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_are_computed_of_open_sizes(name: str, execute: Execute) -> None:
    """Each is of several sizes, since a graph of one may be right by chance."""
    text = '<ir_version: 10, opset_import: ["" : 21]>\n'
    text += "model (float[B, T, 4] x) => (float[P, Q, R] y) <int64 two = {1}, "
    text += "int64[1] zero = {0}, int64[1] less = {-1}, float[1] one = {1.5}> "
    text += f"{{ {SHAPES[name]} }}"
    model = parser.parse_model(text.replace("[P, Q, R]", ""))
    graph = from_onnx(model)
    assert all(not isinstance(n, int) or n > 0 for n in type_of(graph.outputs["y"]).shape)
    rng = np.random.default_rng(0)
    for sizes in ((2, 3, 4), (5, 2, 4)):
        x = rng.standard_normal(sizes).astype(np.float32)
        want: Any = ReferenceEvaluator(model).run(None, {"x": x})
        np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], want[0])


@pytest.mark.parametrize("perm", [[0, 1], [1, 0]])
@pytest.mark.parametrize("x", [(2, 3, 3), (2, 3), (3,)])
def test_a_product_with_a_matrix_that_is_turned_or_not(perm: list[int], x: tuple[int, ...]) -> None:
    """The matrix is square, so that the wrong one of both has the right shape."""
    text = '<ir_version: 10, opset_import: ["" : 21]> m (float'
    text += f"{list(x)} x, float[3, 3] w) => (float y) {{ t = Transpose <perm = {perm}> (w) "
    model = parser.parse_model(text + "y = MatMul (x, t) }")
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal(s).astype(np.float32) for n, s in {"x": x, "w": (3, 3)}.items()}
    want: Any = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(evaluate(from_onnx(model), feeds)["y"], want[0], rtol=1e-5)


@pytest.mark.parametrize("go", [True, False])
def test_a_branch_that_is_known_is_taken(go: bool) -> None:
    model, x = read(BRANCH), np.array([0.5, -1.0, 2.0], np.float32)
    graph = from_onnx(model, known={"go": np.array(go)})
    want: Any = ReferenceEvaluator(model).run(None, {"x": x, "go": np.array(go)})
    np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], want[0])
    assert [node.op_type for node in graph] == ["Exp" if go else "Neg"]


def test_a_branch_that_the_data_chooses_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot read If: If needs a constant as its input 0"):
        from_onnx(read(BRANCH))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("y = RandomNormalLike (x)", "cannot read RandomNormalLike: it draws random numbers"),
        (
            "w = Constant <value_ints: ints = [5, 5]> () z = Expand (x, w) y = Det (z)",
            r"Det: a determinant of f32\[5,5\] needs a matrix factorisation",
        ),
        (
            "y, z = Split <num_outputs = 1000000000, axis = 0> (x)",
            "cannot read Split: num_outputs is 1000000000, and the node has 2 outputs",
        ),
        ("y = ai.other.Op (x)", "its domain ai.other is not"),
    ],
)
def test_what_cannot_be_read_names_its_node(line: str, message: str) -> None:
    text = '<ir_version: 10, opset_import: ["" : 23, "ai.other" : 1]>\n'
    text += f"model (float[1, 1] x) => (float[N] y) {{ {line} }}"
    with pytest.raises(ValueError, match=message):
        from_onnx(parser.parse_model(text))


def test_a_model_of_an_older_form_is_refused() -> None:
    text = '<ir_version: 7, opset_import: ["" : 11]>\n'
    text += "model (float[2, 3] x) => (float[2, 3] y) { y = Softmax (x) }"
    with pytest.raises(ValueError, match="opset 11; fix: convert the model to opset 20 or newer"):
        from_onnx(parser.parse_model(text))


def test_numbers_in_other_files_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers in another file are refused as an initializer and as a constant."""
    monkeypatch.chdir(tmp_path)
    Path("x.data").write_bytes(bytes(12))
    tensor = onnx.TensorProto(name="k", data_type=1, dims=[3])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="x.data")
    initializer, constant = read(BRANCH), read(BRANCH)
    initializer.graph.initializer.append(tensor)
    made = onnx.helper.make_node("Constant", [], ["k"], value=tensor)
    constant.graph.node.insert(0, made)
    for model in (initializer, constant):
        with pytest.raises(ValueError, match=r"tensor 'k' lie in another file; fix: onnx\.load"):
            from_onnx(model, known={"go": np.array(True)})


@pytest.mark.parametrize("other", ["A", "B"])
def test_functions_that_call_themselves_are_refused(other: str) -> None:
    text = '<ir_version: 10, opset_import: ["" : 23, "own" : 1]>\n'
    text += "model (float[3] x) => (float[3] y) { y = own.A (x) }\n"
    for name, inner in (("A", "B"), ("B", other)):
        text += '<domain: "own", opset_import: ["" : 23, "own" : 1]>\n'
        text += f"{name} (x) => (y) {{ y = own.{inner} (x) }}\n"
    with pytest.raises(ValueError, match=r"the function [AB], which calls itself"):
        from_onnx(parser.parse_model(text))


def test_loops_in_loops_end() -> None:
    inner = "w = Mul (v, v)"
    for depth in range(3):
        inner = f"""w = Loop (n, t, v) <
            body: graph = turn{depth} (int64 i{depth}, bool c{depth}, float[3] v)
            => (bool d{depth}, float[3] w) {{ d{depth} = Identity (c{depth}) {inner} }}>"""
    text = '<ir_version: 10, opset_import: ["" : 23]>\n'
    text += f"model (float[3] v) => (float[3] w) <int64 n = {{1000}}, bool t = {{1}}> {{ {inner} }}"
    with pytest.raises(ValueError, match="cannot unroll loops of more than 2048 iterations in all"):
        from_onnx(parser.parse_model(text))


@pytest.mark.parametrize("spoil", ["constant", "type", "input", "output"])
def test_what_the_checker_would_refuse_is_refused_in_one_line(spoil: str) -> None:
    model = read(FUNCTIONS)
    node = onnx.helper.make_node("Gelu", ["x"], ["z"], approximate="tanh")
    model.graph.node.append(node)
    match spoil:
        case "constant":
            model.graph.initializer.add(name="k", data_type=99, dims=[10**9, 10**9])
        case "type":
            model.graph.input[0].type.tensor_type.elem_type = 99
        case "input":
            del model.graph.node[-1].input[:]
        case "output":
            model.graph.output[0].name = "nothing\x1b"
    with pytest.raises(ValueError, match=r".") as error:
        from_onnx(model)
    assert type(error.value) is ValueError
    assert str(error.value).isprintable() and len(str(error.value)) <= 400


@pytest.mark.parametrize("field", [b"h/n", b"model", b"rows"])
def test_names_that_are_not_utf8_are_refused(field: bytes) -> None:
    """Protobuf gives such names as bytes, which no text can hold later."""
    model = read("""<ir_version: 10, opset_import: ["" : 20]>
    model (float[rows] x) => (float[rows] y) { h = Exp (x) y = Neg (h) }""")
    model.graph.node[0].name = "h/n"
    data = model.SerializeToString()
    assert field in data
    spoiled = onnx.load_from_string(data.replace(field, field[:-1] + b"\xdb"))
    with pytest.raises(ValueError, match="which is not UTF-8"):
        from_onnx(spoiled)


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("y = Range (zero, size, one)",
         "int64 zero = {0}, int64 size = {100000000}, int64 one = {1}"),
        ("y = OneHot (at, size, pair)",
         "int64[1] at = {1}, int64 size = {100000000}, int64[2] pair = {0, 1}"),
        ("z = ConstantOfShape (size) y = EyeLike (z)", "int64[2] size = {30000, 30000}"),
    ],
)  # fmt: skip
def test_constants_of_any_size_are_not_made(line: str, sizes: str) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]>\n'
    text += f"model (float[1] x) => (float[N] y) <{sizes}> {{ {line} }}"
    with pytest.raises(ValueError, match=r"it makes a constant of \d+ elements, more than \d+"):
        from_onnx(parser.parse_model(text))


NARROW = """
<ir_version: 10, opset_import: ["" : 18]>
m (float[B, 6, 4] x) => (float[B, 3, 8] y, float total)
<int64[1] zeroth = {0}, int32[2] tail = {3, 8}, int32[1] none = {0}, int32[1] one = {1}> {
    wide = Shape (x)
    narrow = Cast <to = 6> (wide)
    rows = Gather <axis = 0> (narrow, zeroth)
    target = Concat <axis = 0> (rows, tail)
    back = Cast <to = 7> (target)
    y = Reshape (x, back)
    cut = Slice (narrow, none, one, none)
    both = Concat <axis = 0> (cut, one, rows)
    count = ReduceProd <keepdims = 0> (both, zeroth)
    total = Cast <to = 1> (count)
}
"""


def test_shapes_that_are_computed_in_i32_stay_open() -> None:
    """The form that TensorFlow writes serves any number of rows, beside onnx's evaluator."""
    model = onnx.parser.parse_model(NARROW)
    graph = from_onnx(model)
    assert str(type_of(graph.outputs["y"])) == "f32[B,3,8]"
    for rows in (2, 5):
        closed = from_onnx(model, {"B": rows})
        assert str(type_of(closed.outputs["y"])) == f"f32[{rows},3,8]"
        assert not any(node.op_type == "ReduceProd" for node in closed)
        x = np.arange(rows * 24, dtype=np.float32).reshape(rows, 6, 4)
        expected: Any = ReferenceEvaluator(model).run(None, {"x": x})
        for each in (graph, closed):
            found = evaluate(each, {"x": x})
            np.testing.assert_array_equal(found["y"], expected[0])
            assert found["total"] == expected[1] == rows * rows


@pytest.mark.parametrize("end", [10**9, 2**31 - 1, 2**31, 2**63 - 1])
def test_a_slice_to_the_end_of_an_open_size(end: int, execute: Execute) -> None:
    """TensorFlow writes 10^9 there, others the largest number of their type."""
    text = f"""<ir_version: 10, opset_import: ["" : 18]>
    m (float[B, T] x) => (float[B, R] y) {{
        s = Constant <value_ints = [1]> () e = Constant <value_ints = [{end}]> ()
        a = Constant <value_ints = [1]> () y = Slice (x, s, e, a)
    }}"""
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    graph = from_onnx(parser.parse_model(text))
    assert str(type_of(graph.outputs["y"])) == "f32[B,T-1]"
    found = execute(from_onnx(parser.parse_model(text), {"B": 3, "T": 5}), {"x": x})["y"]
    np.testing.assert_array_equal(found, x[:, 1:])


def test_limits_of_another_type_are_refused() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    m (float[3] x) => (float[3] y) <int64 k = {1}> { y = Clip (x, k) }""")
    with pytest.raises(ValueError, match=r"Clip: its limits are of another type than f32\[3\]"):
        from_onnx(model)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("op_type", ["ArgMin", "ArgMax"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float32, np.float64])
def test_the_place_of_the_least_number(
    dtype: type, op_type: str, last: int, execute: Execute
) -> None:
    """Unsigned integers, and the lowest one of others, have no negative."""
    least, most = (-np.inf, np.inf) if issubclass(dtype, np.floating) else (
        np.iinfo(dtype).min, np.iinfo(dtype).max)  # fmt: skip
    x = np.array([[3, 0, 5, 0], [1, most, 1, 0], [least, 4, 2, least], [7, 7, 7, 7]], dtype)
    value = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
    node = onnx.helper.make_node(op_type, ["x"], ["y"], axis=1, select_last_index=last)
    given = onnx.helper.make_tensor_value_info("x", value, (4, 4))
    made = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT64, (4, 1))
    graph = onnx.helper.make_graph([node], op_type, [given], [made])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    want: Any = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(execute(from_onnx(model), {"x": x})["y"], want[0])


@pytest.mark.parametrize("native", ["", "0"], ids=["native", "aten"])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize(
    ("scale", "bias"),
    [((1,), (3,)), ((3,), (1,)), ((), None), ((1, 3), (1, 1)), ((1, 1, 3), ()),
     ((4, 1), (4, 3)), ((1, 4, 3), (1, 4, 1)), ((2, 1, 3), (3,)), ((2, 4, 1), None)],
    ids=str,
)  # fmt: skip
def test_weights_of_a_layer_norm_broadcast_to_its_input(
    scale: tuple[int, ...], bias: tuple[int, ...] | None, axis: int, native: str,
    execute: Execute, build: Callable[[str], None],
) -> None:  # fmt: skip
    """The standard's rule, and onnxruntime's numbers."""
    if native:
        build(native)
    rng, weights = np.random.default_rng(0), {"scale": scale, "bias": bias}
    feeds = {"x": rng.standard_normal((2, 4, 3)).astype(np.float32)}
    feeds |= {n: rng.random(s).astype(np.float32) for n, s in weights.items() if s is not None}
    ends = ["y", "mean", "inverse"]
    node = onnx.helper.make_node("LayerNormalization", [*feeds], ends, axis=axis)
    inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, x.shape)
        for n, x in feeds.items()
    ]
    outputs = [onnx.helper.make_empty_tensor_value_info(n) for n in ends]
    graph = onnx.helper.make_graph([node], "norm", inputs, outputs)
    model = onnx.helper.make_model(
        graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    session = onnxruntime.InferenceSession(model.SerializeToString())
    want: Any = dict(zip(ends, session.run(ends, feeds), strict=True))
    found = execute(from_onnx(model), feeds)
    for name in ends:
        np.testing.assert_allclose(found[name], want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [(2,), (4,), (2, 2, 4, 3), (3, 1, 3)], ids=str)
def test_weights_that_do_not_broadcast_are_refused(scale: tuple[int, ...]) -> None:
    model = parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 17]>
    m (float[2, 4, 3] x, float{list(scale)} s) => (float y) {{ y = LayerNormalization (x, s) }}""")
    with pytest.raises(ValueError, match="LayerNormalization"):
        from_onnx(model)


def test_weights_of_an_open_width_broadcast(execute: Execute) -> None:
    text = """<ir_version: 10, opset_import: ["" : 17]>
    m (float[B, D] x, float[1] s, float[D] b) => (float y) { y = LayerNormalization (x, s, b) }"""
    model = parser.parse_model(text)
    assert str(type_of(from_onnx(model).outputs["y"])) == "f32[B,D]"
    rng = np.random.default_rng(0)
    feeds = {n: rng.random(s).astype(np.float32) for n, s in {"x": (2, 5), "s": 1, "b": 5}.items()}
    want: Any = ReferenceEvaluator(model).run(None, feeds)
    found = execute(from_onnx(model, {"B": 2, "D": 5}), feeds)["y"]
    np.testing.assert_allclose(found, want[0], rtol=1e-5)


FORMS = (
    "half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric",
    "tf_crop_and_resize",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_a_resize_by_scales_whose_sizes_are_not_whole(
    mode: str, form: str, execute: Execute
) -> None:
    """onnxruntime's numbers, which are PyTorch's; onnx's own evaluator has other corners."""
    x = np.random.default_rng(0).standard_normal((1, 1, 5, 4)).astype(np.float32)
    roi = "{0, 0, 0.1, 0.2, 1, 1, 0.8, 0.9}" if form == "tf_crop_and_resize" else "{}"
    for scales in ((1.7, 2.3), (0.5, 0.7), (0.3, 0.3)):
        model = parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 19]>
        m (float[1, 1, 5, 4] x) => (float[1, 1, H, W] y)
        <float[{8 if len(roi) > 2 else 0}] roi = {roi},
         float[4] scales = {{1, 1, {scales[0]}, {scales[1]}}}> {{
            y = Resize <mode = "{mode}", coordinate_transformation_mode = "{form}"> (x, roi, scales)
        }}""")
        runtime = onnxruntime.InferenceSession(model.SerializeToString())
        want = np.asarray(runtime.run(None, {"x": x})[0])
        found = execute(from_onnx(model), {"x": x})["y"]
        np.testing.assert_allclose(found, want, atol=1e-5, err_msg=str(scales))
