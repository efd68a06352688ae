"""Models that are read: functions of their own, named sizes, branches, and what is refused; the
oracle is onnx's reference evaluator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
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
