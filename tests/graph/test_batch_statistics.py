"""Files with several batch normalizations of one width, run by stock onnxruntime beside PyTorch.

onnxruntime writes running statistics into the memory of those it is given, also where these are
constants that several nodes share (graph/batch_statistics.py).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onward.graph.build import Builder
from onward.graph.file import to_onnx, to_proto
from onward.graph.graph import Graph, Role, Value
from onward.graph.types import DType, Type, parse_type


def normalized(layers: int, momentum: float, x: str) -> Graph:
    """x -> `layers` times BatchNormalization in training form; all share their constants. The
    negated statistics are outputs, which are computed when all layers have run."""
    graph = Graph()
    b, type = Builder(graph), parse_type(x)
    value = graph.input("x", type, Role.BATCH)
    width = Type(DType.FLOAT, type.shape[1:2])
    ones, zeros = b.full(1.0, width), b.full(0.0, width)
    scale = b.full(0.5, Type(type.dtype, width.shape))
    held = dict[str, Value]()
    for i in range(layers):
        value, mean, variance = b.BatchNormalization(
            value, scale, b.cast(zeros, type.dtype), zeros, ones, epsilon=1e-3,
            momentum=momentum, training_mode=1,
        )  # fmt: skip
        value = b.Add(value, b.scalar(1.0 + i, type.dtype))
        held |= {f"mean{i}": mean, f"variance{i}": variance}
    graph.outputs = {"y": value, **{name: b.Neg(x) for name, x in held.items()}}
    return graph


@pytest.mark.parametrize("x", ["f32[4,3]", "f32[4,3,5]", "f32[4,3,5,2]", "f16[4,3,5]"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("opset", [18, 23])
def test_onnxruntime_computes_each_of_them(x: str, momentum: float, opset: int) -> None:
    graph = normalized(3, momentum, x)
    model = ir.to_proto(to_onnx(graph, opset=opset))
    dtype, shape = parse_type(x).dtype.numpy(), parse_type(x).shape
    given = (2 * np.random.default_rng(0).standard_normal(shape) + 1).astype(dtype)  # type: ignore[arg-type]
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [item.name for item in session.get_outputs()]
    results = session.run(None, {"x": given})
    found = {name: np.asarray(x) for name, x in zip(names, results, strict=True)}
    value = torch.tensor(given)
    width = shape[1]
    assert isinstance(width, int)
    dims = [d for d in range(value.dim()) if d != 1]
    rtol, atol = (1e-5, 1e-6) if value.dtype == torch.float32 else (1e-7, 5e-3)
    for i in range(3):
        mean, variance = value.float().mean(dims), value.float().var(dims, unbiased=False)
        share = momentum
        np.testing.assert_allclose(found[f"mean{i}"], (share - 1) * mean, rtol, atol)
        np.testing.assert_allclose(
            found[f"variance{i}"], (share - 1) * variance - share, rtol, atol
        )
        value = torch.nn.functional.batch_norm(
            value, None, None, torch.full((width,), 0.5, dtype=value.dtype), training=True, eps=1e-3
        ) + (1.0 + i)
    np.testing.assert_allclose(found["y"], value, rtol, atol)


def test_a_second_run_gives_the_same() -> None:
    session = onnxruntime.InferenceSession(
        to_proto(normalized(2, 0.9, "f32[4,3]")).SerializeToString()
    )
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    first, second = (session.run(None, {"x": x}) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
