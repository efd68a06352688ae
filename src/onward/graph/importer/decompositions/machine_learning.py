"""Ops of the domain ai.onnx.ml, around networks that scikit-learn's exporter writes
(https://github.com/onnx/onnx/blob/main/docs/Operators-ml.md): what prepares features, what chooses
a class, and linear models, whose coefficients are settings and stay as they are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import NodeCall, Results, decomposition
from onward.graph.types import DType

DOMAIN = "ai.onnx.ml"
LEAST = 1e-30  # a norm below it counts as this


@decomposition(f"{DOMAIN}.ArrayFeatureExtractor")
def _features(c: NodeCall) -> Results:
    """Elements of x's last dim by their places, which may have any shape."""
    index = c.b.reshape(c.x(1), (math.prod(c.sizes(1)),))
    x = c.x() if c.rank() > 1 else c.b.unsqueeze(c.x(), [0])
    return c.b.Gather(x, index, axis=type_of(x).rank - 1)


@decomposition(f"{DOMAIN}.ZipMap")
def _zip_map(c: NodeCall) -> Results:
    """Probabilities f32[B,C]; a runtime returns them as a dict for each row, by class."""
    return c.b.Identity(c.x())


@decomposition(f"{DOMAIN}.Scaler")
def _scaler(c: NodeCall) -> Results:
    x = c.b.cast(c.x(), DType.FLOAT)
    if (offset := c.attr("offset")) is not None:
        x = c.b.Sub(x, _row(c, offset))
    return x if (scale := c.attr("scale")) is None else c.b.Mul(x, _row(c, scale))


@decomposition(f"{DOMAIN}.Normalizer")
def _normalizer(c: NodeCall) -> Results:
    b, x, norm = c.b, c.b.cast(c.x(), DType.FLOAT), c.attr("norm", "MAX")
    axis = b.ints([-1])
    if norm == "L2":
        size = b.Sqrt(b.ReduceSum(b.Mul(x, x), axis, keepdims=1))
    else:
        if norm not in ("L1", "MAX"):
            raise ValueError(f"its norm is {norm}; fix: MAX, L1 or L2")
        if norm == "MAX":  # the largest number, which may be below 0
            size = b.ReduceMax(x, axis, keepdims=1)
            return b.Div(x, b.Where(b.Equal(size, 0.0), 1.0, size))
        size = b.ReduceSum(b.Abs(x), axis, keepdims=1)
    return b.Div(x, b.Max(size, b.scalar(LEAST, DType.FLOAT)))


@decomposition(f"{DOMAIN}.Binarizer")
def _binarizer(c: NodeCall) -> Results:
    above = c.b.Greater(c.x(), c.b.scalar(float(c.attr("threshold", 0.0)), c.type().dtype))
    return c.b.cast(above, c.type().dtype)


@decomposition(f"{DOMAIN}.Imputer")
def _imputer(c: NodeCall) -> Results:
    """x with other numbers in place of one that stands for a missing one."""
    b, x = c.b, c.x()
    kind = "float" if c.type().is_floating else "int64"
    values = _row(c, c.attr(f"imputed_value_{kind}s"))
    missing = c.attr(f"replaced_value_{kind}", 0)
    is_nan = c.type().is_floating and math.isnan(missing)
    hidden = b.IsNaN(x) if is_nan else b.Equal(x, b.scalar(missing, c.type().dtype))
    return b.Where(hidden, values, x)


@decomposition(f"{DOMAIN}.FeatureVectorizer")
def _vectorizer(c: NodeCall) -> Results:
    columns = [c.b.cast(c.x(i), DType.FLOAT) for i in range(len(c.inputs))]
    return c.b.Concat(*columns, axis=-1)


@decomposition(f"{DOMAIN}.LinearRegressor")
def _regressor(c: NodeCall) -> Results:
    return _after(c, _scores(c, int(c.attr("targets", 1))))


@decomposition(f"{DOMAIN}.LinearClassifier")
def _classifier(c: NodeCall) -> Results:
    """The classes i64[B], and scores f32[B,C]."""
    b, classes = c.b, c.attr("classlabels_ints")
    if not classes:
        raise ValueError("its classes are strings; fix: export it with whole numbers")
    scores = _scores(c, len(c.attr("coefficients")) // c.sizes()[1])
    if type_of(scores).shape[1] == 1:
        if len(classes) != 2:
            raise ValueError("it has one score and not two classes")
        both = b.Concat(b.Neg(scores), scores, axis=1)
        place = b.ArgMax(both, axis=1, keepdims=0)
        if c.attr("post_transform", "NONE") == "LOGISTIC":
            scores = b.Sigmoid(both)
        else:  # onnxruntime takes the one score for a probability, whatever the transform
            scores = b.Concat(b.Sub(1.0, scores), scores, axis=1)
    else:
        scores = _after(c, scores)
        place = b.ArgMax(scores, axis=1, keepdims=0)
    return [b.Gather(b.const(np.array(classes, np.int64)), place, axis=0), scores]


def _scores(c: NodeCall, count: int) -> Value:
    """The products of x f32[B,F] with `count` rows of coefficients, with their intercepts."""
    x = c.b.cast(c.x(), DType.FLOAT)
    table = np.array(c.attr("coefficients"), np.float32).reshape(count, -1)
    y = c.b.MatMul(x, c.b.const(np.ascontiguousarray(table.T)))
    given = c.attr("intercepts")
    return y if not given else c.b.Add(y, _row(c, given))


def _after(c: NodeCall, scores: Value) -> Value:
    """Scores after the transform that the node names."""
    transform = c.attr("post_transform", "NONE")
    if transform == "NONE":
        return scores
    if transform == "SOFTMAX":
        return c.b.Softmax(scores, axis=-1)
    if transform == "LOGISTIC":
        return c.b.Sigmoid(scores)
    raise ValueError(f"its post_transform is {transform}; fix: NONE, SOFTMAX or LOGISTIC")


def _row(c: NodeCall, values: Any) -> Value:
    """Numbers of an attribute, in the type of the features that they are for."""
    kind = np.int64 if c.type().dtype == DType.INT64 and c.op_type == "Imputer" else np.float32
    return c.b.const(np.array(values, kind))
