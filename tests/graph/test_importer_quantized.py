"""Quantised values are read as what onnxruntime computes, and their gradients as those of PyTorch's
fake quantisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onward
from onward import TrainingSession
from onward.graph.graph import Graph
from onward.graph.importer import from_onnx

Execute = Callable[[Graph, dict[str, np.ndarray]], dict[str, np.ndarray]]
KINDS = {"i8": np.int8, "u8": np.uint8, "i16": np.int16}


def model(
    scale: np.ndarray, zero: np.ndarray | None, shape: tuple[Any, ...], axis: int | None = None,
    opset: int = 21, **more: Any,
) -> onnx.ModelProto:  # fmt: skip
    """x, rounded to a grid and back."""
    given = {} if axis is None else {"axis": axis}
    extra = [scale_name for scale_name in ("s", "z") if scale_name == "s" or zero is not None]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *extra], ["q"], **given, **more),
        helper.make_node("DequantizeLinear", ["q", *extra], ["y"], **given, **more),
    ]
    arrays = {"s": scale, **({} if zero is None else {"z": zero})}
    graph = helper.make_graph(
        nodes, "quantised",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(x, n) for n, x in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", opset)])


CASES: dict[str, tuple[np.ndarray, np.ndarray | None, int | None, dict[str, Any]]] = {
    "u8 without a zero point": (np.array(0.03, np.float32), None, None, {}),
    **{
        kind: (np.array(0.02, np.float32), np.array(5, dtype), None, {})
        for kind, dtype in KINDS.items()
    },
    "along dim 1": (
        np.array([0.1, 0.02, 0.5, 0.001], np.float32), np.array([0, 3, -4, 9], np.int8), 1, {}
    ),
    "along the last dim": (np.full(6, 0.04, np.float32), np.zeros(6, np.int8), -1, {}),
    "in blocks": (
        np.array([[[0.1, 0.02, 0.3]] * 4] * 3, np.float32), np.zeros((3, 4, 3), np.int8), 2,
        {"block_size": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_onnxruntime(name: str, execute: Execute) -> None:
    scale, zero, axis, more = CASES[name]
    made = model(np.asarray(scale), zero, (3, 4, 6), axis, **more)
    x = (2 * np.random.default_rng(0).standard_normal((3, 4, 6))).astype(np.float32)
    x.flat[:4] = 0.05, -0.05, 1e4, -1e4  # halves are rounded to even, and what is beyond is cut
    session = onnxruntime.InferenceSession(made.SerializeToString())
    [want] = session.run(None, {"x": x})
    np.testing.assert_array_equal(execute(from_onnx(made), {"x": x})["y"], want)


def network() -> onnx.ModelProto:
    """y = Q(Q(x) W) of frozen i8 weights, with a bias that is trained; x = table[ids]."""
    rng = np.random.default_rng(1)
    arrays = {
        "table": rng.standard_normal((9, 4)).astype(np.float32),
        "w": rng.integers(-100, 100, (4, 3)).astype(np.int8),
        "ws": np.array([0.01, 0.02, 0.005], np.float32), "wz": np.array([0, 1, -2], np.int8),
        "bias": rng.standard_normal(3).astype(np.float32),
        "s": np.float32(0.01), "z": np.array(3, np.int8),
    }  # fmt: skip
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=1),
        helper.make_node("MatMul", ["xd", "wd"], ["m"]),
        helper.make_node("Add", ["m", "bias"], ["a"]),
        helper.make_node("QuantizeLinear", ["a", "s", "z"], ["aq"]),
        helper.make_node("DequantizeLinear", ["aq", "s", "z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "network",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["B"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 3])],
        [numpy_helper.from_array(np.asarray(x), n) for n, x in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def test_gradients_pass_straight_through_as_in_pytorch() -> None:
    """Also where numbers lie beyond the grid: there they stop."""
    file = network()
    own = {t.name: torch.tensor(numpy_helper.to_array(t)) for t in file.graph.initializer}
    session = TrainingSession(file, onward.optim.SGD(lr=0.1), onward.loss.mse("y"))
    assert set(session.state_dict()) == {"table", "bias"}
    table, bias = (own[n].clone().requires_grad_() for n in ("table", "bias"))
    optimizer = torch.optim.SGD([table, bias], lr=0.1)
    weight = (own["w"].float() - own["wz"]) * own["ws"]
    rng = np.random.default_rng(2)
    cut = 0
    for _ in range(5):
        ids, labels = rng.integers(0, 9, 6), rng.standard_normal((6, 3)).astype(np.float32)
        found = session.step({"ids": ids, "labels": labels})
        x = torch.fake_quantize_per_tensor_affine(table[torch.tensor(ids)], 0.01, 3, -128, 127)
        a = x @ weight + bias
        cut += int((a.detach().abs() > 1.3).sum())
        y = torch.fake_quantize_per_tensor_affine(a, 0.01, 3, -128, 127)
        loss = torch.nn.functional.mse_loss(y, torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    assert cut
    state = session.state_dict()
    np.testing.assert_allclose(state["table"], table.detach(), atol=1e-6)
    np.testing.assert_allclose(state["bias"], bias.detach(), atol=1e-6)


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "UINT16", "INT4"])
def test_other_grids_are_refused(kind: str) -> None:
    made = model(np.asarray(np.float32(0.1)), None, (3, 4), opset=21, output_dtype=getattr(
        TensorProto, kind
    ))  # fmt: skip
    del made.graph.node[1].attribute[:]
    with pytest.raises(ValueError, match=r"QuantizeLinear: it makes numbers of .*not supported"):
        from_onnx(made)


@pytest.mark.parametrize(
    "between",
    ["Transpose <perm = [1, 0]> (q)", "Flatten <axis = 0> (q)", "Concat <axis = 0> (q, q)"],
)
def test_rounded_numbers_that_are_moved_are_refused(between: str) -> None:
    """The gradient would stop there without a word."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
    m (float[3, 4] x) => (float[A, B] y) <float s = {{0.1}}, int8 z = {{0}}> {{
        q = QuantizeLinear (x, s, z) t = {between} y = DequantizeLinear (t, s, z)
    }}""")
    with pytest.raises(ValueError, match=r"other ops have moved, through which no gradient"):
        from_onnx(model)
