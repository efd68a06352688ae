"""Ops of the domain ai.onnx.ml are read as what onnxruntime computes for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onward.graph.graph import Graph
from onward.graph.importer import from_onnx
from onward.graph.importer.decomposition import DECOMPOSITIONS
from onward.graph.importer.decompositions.machine_learning import DOMAIN

Execute = Callable[[Graph, dict[str, np.ndarray]], dict[str, np.ndarray]]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 4)).astype(np.float32)
WHOLE = RNG.integers(-2, 3, (5, 4))
HOLES = np.where(RNG.random((5, 4)) < 0.3, np.nan, X).astype(np.float32)
COLUMNS = [0.5, -1.0, 2.0, 0.25]
ROWS = [float(x) for x in RNG.standard_normal(12)]

# op, inputs, attributes, outputs
ONE: dict[str, Any] = {
    "coefficients": [1.0, -2, 3, 0.5], "intercepts": [0.1], "classlabels_ints": [5, 7],
}  # fmt: skip
CALLS: dict[str, tuple[str, list[np.ndarray], dict[str, Any], int]] = {
    "features": ("ArrayFeatureExtractor", [X, np.array([2, 0])], {}, 1),
    "a feature": ("ArrayFeatureExtractor", [X, np.array([[3]])], {}, 1),
    "elements": ("ArrayFeatureExtractor", [np.arange(6), np.array([[4, 1, 1]])], {}, 1),
    "features of more dims": (
        "ArrayFeatureExtractor", [np.ones((2, 3, 4), np.float32), np.array([1, 3])], {}, 1,
    ),
    "scaler": ("Scaler", [X], {"offset": COLUMNS, "scale": COLUMNS[::-1]}, 1),
    "scaler of one": ("Scaler", [X], {"offset": [1.0], "scale": [0.5]}, 1),
    "scaler of whole numbers": ("Scaler", [WHOLE], {"offset": COLUMNS, "scale": COLUMNS}, 1),
    "L1": ("Normalizer", [X], {"norm": "L1"}, 1),
    "L2": ("Normalizer", [X], {"norm": "L2"}, 1),
    "binarizer": ("Binarizer", [X], {"threshold": 0.25}, 1),
    "imputer": (
        "Imputer", [HOLES], {"imputed_value_floats": COLUMNS, "replaced_value_float": np.nan}, 1,
    ),
    "imputer of one": (
        "Imputer", [HOLES], {"imputed_value_floats": [7.0], "replaced_value_float": np.nan}, 1,
    ),
    "imputer of whole numbers": (
        "Imputer", [WHOLE], {"imputed_value_int64s": [5, 6, 7, 8], "replaced_value_int64": -1}, 1,
    ),
    "vectorizer": ("FeatureVectorizer", [X, X[:, :2]], {"inputdimensions": [4, 2]}, 1),
    "regressor": (
        "LinearRegressor", [X], {"coefficients": ROWS, "intercepts": [1.0, 2.0, 3.0], "targets": 3},
        1,
    ),
    "regressor without intercepts": ("LinearRegressor", [X], {"coefficients": COLUMNS}, 1),
    "classifier": (
        "LinearClassifier", [X],
        {"coefficients": ROWS, "intercepts": [0.1, 0.2, 0.3], "classlabels_ints": [3, 5, 9],
         "post_transform": "SOFTMAX"}, 2,
    ),
    "classifier of scores": (
        "LinearClassifier", [X],
        {"coefficients": ROWS, "intercepts": [0.1, 0.2, 0.3], "classlabels_ints": [3, 5, 9]}, 2,
    ),
    "classifier by a sigmoid": (
        "LinearClassifier", [X],
        {"coefficients": ROWS, "intercepts": [0.1, 0.2, 0.3], "classlabels_ints": [0, 1, 2],
         "post_transform": "LOGISTIC"}, 2,
    ),
    "one score": ("LinearClassifier", [X], {**ONE, "post_transform": "NONE"}, 2),
    "one score by a softmax": ("LinearClassifier", [X], {**ONE, "post_transform": "SOFTMAX"}, 2),
    "one score by a sigmoid": ("LinearClassifier", [X], {**ONE, "post_transform": "LOGISTIC"}, 2),
    "norm by a largest number below 0": (
        "Normalizer", [np.array([[-1, -2, -4], [0, -3, 0], [1, -8, 2]], np.float32)],
        {"norm": "MAX"}, 1,
    ),
}  # fmt: skip


def model(op: str, given: list[np.ndarray], attrs: dict[str, Any], outputs: int) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(given))]
    made = [f"y{i}" for i in range(outputs)]
    kinds = [helper.np_dtype_to_tensor_dtype(x.dtype) for x in given]
    fixed = op == "ArrayFeatureExtractor"  # its places are an initializer
    graph = helper.make_graph(
        [helper.make_node(op, names, made, domain=DOMAIN, **attrs)], "call",
        [helper.make_tensor_value_info(n, k, x.shape)
         for n, k, x in list(zip(names, kinds, given, strict=True))[: 1 if fixed else None]],
        [helper.make_empty_tensor_value_info(n) for n in made],
        [onnx.numpy_helper.from_array(given[1], "x1")] if fixed else [],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=imports)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_onnxruntimes(name: str, execute: Execute) -> None:
    op, given, attrs, outputs = CALLS[name]
    made = model(op, given, attrs, outputs)
    session = onnxruntime.InferenceSession(made.SerializeToString())
    feeds = {x.name: given[i] for i, x in enumerate(session.get_inputs())}
    exact = session.run(None, feeds)
    graph = from_onnx(made)
    found = execute(graph, feeds)
    for i, array in enumerate(exact):
        want = np.asarray(array)
        assert found[f"y{i}"].shape == want.shape
        np.testing.assert_allclose(found[f"y{i}"], want, rtol=1e-5, atol=1e-6)


def test_every_op_is_tried() -> None:
    own = {n.removeprefix(f"{DOMAIN}.") for n in DECOMPOSITIONS if n.startswith(f"{DOMAIN}.")}
    assert own == {call[0] for call in CALLS.values()} | {"ZipMap"}


def test_a_zip_map_hands_probabilities_on(execute: Execute) -> None:
    made = model("ZipMap", [X], {"classlabels_int64s": [0, 1, 2, 3]}, 1)
    np.testing.assert_array_equal(execute(from_onnx(made), {"x0": X})["y0"], X)


REFUSED = {
    "a norm": ("Normalizer", [X], {"norm": "L3"}, "its norm is L3"),
    "a transform": (
        "LinearRegressor", [X], {"coefficients": COLUMNS, "post_transform": "PROBIT"}, "PROBIT",
    ),
    "classes by name": (
        "LinearClassifier", [X], {"coefficients": ROWS, "classlabels_strings": ["a", "b", "c"]},
        "its classes are strings",
    ),
    "trees": ("TreeEnsembleRegressor", [X], {}, "its domain ai.onnx.ml is not standard"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name: str) -> None:
    op, given, attrs, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        from_onnx(model(op, given, attrs, 1))
