"""ONNX models in onnx's text form after the forward passes, beside onnx's evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import parser
from onnx.reference import ReferenceEvaluator

from onward.graph.evaluate import evaluate
from onward.graph.importer import from_onnx
from onward.kernels import Target
from onward.plan import Fusible
from onward.rewrite import FORWARD, run

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'


def rewritten(text: str, feeds: dict[str, np.ndarray]) -> list[str]:
    """The ops after the passes of FORWARD; results must be those of onnx's evaluator."""
    model = parser.parse_model(HEAD + text)
    onnx.checker.check_model(model)
    graph = from_onnx(model)
    made, _ = run(graph, FORWARD, (), refuse=Fusible(Target(instructions="plain")))
    want: Any = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(evaluate(made, feeds)["y"], want[0], rtol=1e-4, atol=1e-5)
    return [node.op_type for node in made]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)
