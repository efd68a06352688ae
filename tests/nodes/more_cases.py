"""Calls that onnx's node tests leave out, for the comparison with torch's autograd: other ranks,
groups, dilations and directions, and the ties and kinks where a gradient is a convention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

OPSET = 25


@dataclass(frozen=True)
class Call:
    """One node in fp64. inputs: an array, or None for one that is left out. kink: some of the
    numbers lie where a gradient is not unique."""

    op: str
    inputs: tuple[Any, ...]
    attrs: dict[str, Any] = field(default_factory=dict[str, Any])
    outputs: int = 1
    kink: bool = False
    opset: int = OPSET

    @property
    def names(self) -> list[str]:
        return ["" if x is None else f"x{i}" for i, x in enumerate(self.inputs)]

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        return {n: np.asarray(x) for n, x in zip(self.names, self.inputs, strict=True) if n}

    @property
    def model(self) -> onnx.ModelProto:
        helper, ends = onnx.helper, [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, self.names, ends, **self.attrs)
        inputs = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for n, x in self.feeds.items()
        ]
        outputs = [onnx.ValueInfoProto(name=n) for n in ends]
        graph = helper.make_graph([node], self.op, inputs, outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
        return onnx.shape_inference.infer_shapes(model)

    def __str__(self) -> str:
        attrs = ",".join(f"{k}={v}" for k, v in self.attrs.items())
        shapes = "x".join(str(np.shape(x)).replace(" ", "") for x in self.inputs)
        return f"{self.op}({shapes}{attrs}){'kink' if self.kink else ''}".replace(" ", "")


_rng = np.random.default_rng(5)


def f(*shape: int) -> np.ndarray:
    """Numbers of which no two are the same."""
    return _rng.standard_normal(shape)


def positive(*shape: int) -> np.ndarray:
    return _rng.uniform(0.5, 2.0, shape)


def i64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def windows() -> Iterator[Call]:
    for rank in (1, 2, 3):
        x = f(2, 4, *(7, 6, 5)[:rank])
        for group, more in itertools.product(
            (1, 2, 4),
            (
                {},
                {"strides": [2] * rank, "pads": [1] * 2 * rank},
                {"dilations": [2] * rank, "pads": [2, 1, 2][:rank] + [1, 2, 0][:rank]},
            ),
        ):
            attrs = {"group": group, **more}
            yield Call("Conv", (x, f(8, 4 // group, *[3, 2, 2][:rank]), f(8)), attrs)
            yield Call("ConvTranspose", (x, f(4, 6 // min(group, 2), *[3, 2, 2][:rank])), attrs)
        out = {"strides": [3] * rank, "output_padding": [1] * rank}
        yield Call("ConvTranspose", (x, f(4, 3, *[2] * rank), f(3)), out)
        kernel = {"kernel_shape": [3, 2, 2][:rank]}
        for op in ("MaxPool", "AveragePool", "LpPool"):
            for more in (
                {},
                {"strides": [2] * rank, "pads": [1] * 2 * rank},
                {"strides": [2] * rank, "ceil_mode": 1},
                {"dilations": [2] * rank},
                {"auto_pad": "SAME_UPPER"},
                {"auto_pad": "SAME_LOWER", "strides": [2] * rank},
            ):
                yield Call(op, (x,), {**kernel, **more})
        yield Call("AveragePool", (x,), {**kernel, "pads": [1] * 2 * rank, "count_include_pad": 1})
        yield Call("LpPool", (x,), {**kernel, "p": 3})
        for p in (1, 2, 3):
            yield Call("GlobalLpPool", (x,), {"p": p})
        yield Call("GlobalMaxPool", (x,))
        yield Call("GlobalAveragePool", (x,))
    tied = np.round(f(1, 2, 6, 6))
    yield Call("MaxPool", (tied,), {"kernel_shape": [3, 3]}, kink=True)
    yield Call("MaxPool", (tied,), {"kernel_shape": [2, 2], "ceil_mode": 1}, kink=True)
    yield Call("GlobalMaxPool", (tied,), kink=True)


def samples() -> Iterator[Call]:
    for rank in (1, 2, 3):
        x, none = f(2, 3, *(6, 5, 4)[:rank]), np.zeros(0)
        up = np.array([1, 1, *(2.0, 3.0, 2.0)[:rank]], np.float32)
        down = np.array([1, 1, *(0.5, 0.6, 0.75)[:rank]], np.float32)
        sizes = i64(2, 3, *(9, 3, 7)[:rank])
        for scale in ((none, up), (none, down), (none, None, sizes)):
            inputs = (x, *scale)
            at = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            yield Call("Resize", inputs, {"mode": "nearest", **at})
            yield Call("Resize", inputs, {"mode": "nearest", "nearest_mode": "round_prefer_ceil"})
            yield Call("Resize", inputs, {"mode": "linear"})
        aligned = {"coordinate_transformation_mode": "align_corners"}
        for scale in ((none, None, sizes), (none, down)):
            yield Call("Resize", (x, *scale), {"mode": "linear", **aligned})
    for more in ({}, aligned, {"antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5}):
        inputs = (f(2, 3, 6, 5), none, None, i64(2, 3, 4, 8))
        yield Call("Resize", inputs, {"mode": "cubic", **more})
    wide = {"mode": "linear", "antialias": 1, "exclude_outside": 1}
    yield Call("Resize", inputs, wide)
    for mode, padding, aligned in itertools.product(
        ("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1)
    ):
        attrs = {"mode": mode, "padding_mode": padding, "align_corners": aligned}
        yield Call("GridSample", (f(2, 3, 5, 4), 0.8 * f(2, 3, 6, 2)), attrs)
        if mode != "cubic":
            yield Call("GridSample", (f(2, 2, 4, 3, 5), 0.8 * f(2, 2, 3, 2, 3)), attrs)
    corners = np.linspace(-1, 1, 5)
    grid = np.stack(np.meshgrid(corners, corners), -1)[None]
    yield Call("GridSample", (f(1, 2, 5, 5), grid), {"align_corners": 1}, kink=True)
    yield Call("GridSample", (f(1, 2, 5, 5), grid), {"mode": "nearest"}, kink=True)
    for aligned in (0, 1):
        yield Call("AffineGrid", (f(2, 2, 3), i64(2, 3, 4, 5)), {"align_corners": aligned})
        yield Call("AffineGrid", (f(2, 3, 4), i64(2, 3, 4, 5, 2)), {"align_corners": aligned})


def recurrent() -> Iterator[Call]:
    steps, batch, wide, hidden = 4, 3, 2, 5
    for op, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
        for direction, layout in itertools.product(("forward", "reverse", "bidirectional"), (0, 1)):
            ways = 2 if direction == "bidirectional" else 1
            attrs: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
            attrs |= {"layout": layout}
            if op == "GRU":
                attrs["linear_before_reset"] = 1
            x = f(batch, steps, wide) if layout else f(steps, batch, wide)
            w, r = f(ways, gates * hidden, wide), f(ways, gates * hidden, hidden)
            b = f(ways, 2 * gates * hidden)
            states = [f(batch, ways, hidden) if layout else f(ways, batch, hidden)]
            states += [states[0] * 0.5] if op == "LSTM" else []
            outputs = 3 if op == "LSTM" else 2
            yield Call(op, (x, w, r), attrs, outputs)
            yield Call(op, (x, w, r, b, None, *states), attrs, outputs)
            if direction != "reverse":
                lengths = np.array([4, 1, 2], np.int32)
                yield Call(op, (x, w, r, b, lengths, *states), attrs, outputs)
    attrs = {"hidden_size": 5, "activations": ["Relu"]}
    yield Call("RNN", (f(4, 3, 2), f(1, 5, 2), f(1, 5, 5)), attrs, 2)


def indexed() -> Iterator[Call]:
    x, index = f(4, 3), np.array([[1, -1, 1], [0, 0, 1]], np.int64)
    for reduction, axis in itertools.product(("none", "add", "mul", "max", "min"), (0, 1)):
        at = np.array([[1, -1, 0], [0, 2, 1]], np.int64) if reduction == "none" else index
        attrs = {"reduction": reduction, "axis": axis}
        updates = f(2, 3)
        if reduction == "none" and axis == 1:
            at = np.array([[0, 2, 1], [1, 0, 2]], np.int64)
        yield Call("ScatterElements", (x, at, updates), attrs)
        if axis == 0:
            rows = i64(1, -1) if reduction == "none" else i64(2, 2)
            yield Call("ScatterND", (x, rows[:, None], updates), {"reduction": reduction})
            cells = np.array([[0, 1], [3, 2]], np.int64)
            yield Call("ScatterND", (x, cells, f(2)), {"reduction": reduction})
    for reduction in ("max", "min"):
        tied = np.zeros((4, 3)), index, np.zeros((2, 3))
        yield Call("ScatterElements", tied, {"reduction": reduction}, kink=True)
        places = np.array([[2], [2]], np.int64)
        tied = np.zeros((4, 3)), places, np.zeros((2, 3))
        yield Call("ScatterND", tied, {"reduction": reduction}, kink=True)
    with_zero = np.array([[2.0, 0.0, 3.0], [1.0, 0.0, 0.0], [1.0, 2.0, 3.0], [4.0, 1.0, 1.0]])
    yield Call("ScatterElements", (with_zero, index, f(2, 3)), {"reduction": "mul"})
    for axis in (0, 1, -1):
        yield Call("Gather", (f(4, 3, 2), index[:, :2]), {"axis": axis})
    yield Call("GatherElements", (f(4, 3), index), {"axis": 1})
    yield Call("GatherND", (f(4, 3, 2), np.array([[0, 1], [3, -1], [0, 1]], np.int64)))
    yield Call("GatherND", (f(2, 3, 2), np.array([[[0], [0]], [[2], [1]]], np.int64)),
               {"batch_dims": 1})  # fmt: skip
    for size in (1, 2, 3, 4):
        yield Call("Det", (f(2, 3, size, size),))
    yield Call("Det", (f(3, 3),))
    for upper, k in itertools.product((0, 1), (-1, 0, 2)):
        yield Call("Trilu", (f(2, 4, 5), np.array(k, np.int64)), {"upper": upper})
    for mode in ("constant", "edge", "reflect", "wrap"):
        yield Call("Pad", (f(3, 4, 5), i64(1, 0, 2, 2, 1, 0)), {"mode": mode})
    yield Call("Pad", (f(3, 4, 5), i64(-1, 2, 0, 1, -1, 0)))
    for largest, axis in itertools.product((0, 1), (0, -1)):
        yield Call("TopK", (f(4, 3), i64(2)), {"largest": largest, "axis": axis}, 2)
    yield Call("TopK", (np.array([[1.0, 2.0, 2.0, 2.0, 0.0]]), i64(2)), {}, 2, kink=True)
    yield Call("Where", (np.array([[True], [False]]), f(2, 3), f(3)))
    yield Call("Einsum", (f(3, 3),), {"equation": "ii->i"})
    yield Call("Einsum", (f(2, 3), f(3, 4), f(4, 2)), {"equation": "ij,jk,kl->il"})
    yield Call("Einsum", (f(2, 4, 3), f(2, 3, 5)), {"equation": "...ij,...jk->...ik"})
    yield Call("Einsum", (f(2, 3), f(2, 3)), {"equation": "ij,ij->"})


def pointwise() -> Iterator[Call]:
    at_kinks = np.array([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 0.0, 900.0, -900.0])
    for op, attrs in (
        ("Abs", {}), ("Relu", {}), ("Sign", {}), ("Elu", {"alpha": 2.0}), ("Selu", {}),
        ("Celu", {"alpha": 2.0}), ("LeakyRelu", {"alpha": 0.1}), ("HardSwish", {}),
        ("HardSigmoid", {"alpha": 0.5, "beta": 0.5}), ("ThresholdedRelu", {"alpha": 0.5}),
        ("Shrink", {"lambd": 0.5}), ("Shrink", {"lambd": 0.5, "bias": 0.5}),
        ("Shrink", {"lambd": 0.5, "bias": 0.2}),
    ):  # fmt: skip
        yield Call(op, (at_kinks,), attrs, kink=True)
    yield Call("PRelu", (at_kinks, np.array([0.25])), kink=True)
    yield Call("PRelu", (f(2, 3, 4), f(3, 1)))
    yield Call("Clip", (at_kinks, np.array(-0.5), np.array(0.5)), kink=True)
    yield Call("Clip", (f(4), np.array(0.5), np.array(-0.5)))
    yield Call("Hardmax", (np.round(f(3, 4)),), kink=True)
    for op in ("Max", "Min"):
        yield Call(op, (np.round(f(3, 4)), np.round(f(4))), kink=True)
        yield Call(op, (np.zeros(3), np.zeros(3), np.zeros(3)), kink=True)
    for op in ("Ceil", "Floor", "Round"):
        yield Call(op, (at_kinks,))
    x, y = np.array([5.5, -5.5, 5.5, -5.5]), np.array([2.0, 2.0, -2.0, -2.0])
    for fmod in (0, 1):
        yield Call("Mod", (x, y), {"fmod": fmod}, opset=28)
    yield Call("Pow", (np.array([0.0, 0.0, 2.0, -2.0, 3.0]), np.array([2.0, 1.0, 0.0, 3.0, 0.5])))
    yield Call("Pow", (positive(3, 1), f(4)))


def reduced() -> Iterator[Call]:
    for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum",
                 "SumSquare"):  # fmt: skip
        for axes, keep in itertools.product(((1,), (0, 2), ()), (0, 1)):
            yield Call(f"Reduce{name}", (positive(2, 3, 4), i64(*axes)), {"keepdims": keep})
    tied = np.array([[1.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    for op in ("ReduceMax", "ReduceMin"):
        yield Call(op, (tied, i64(1)), kink=True)
    for op in ("ReduceL1", "ReduceL2"):
        yield Call(op, (np.array([[0.0, 0.0], [3.0, 0.0]]), i64(1)), kink=True)
    for zeros in ([2.0, 0.0, 3.0], [0.0, 2.0, 0.0], [1.0, 2.0, 3.0]):
        yield Call("ReduceProd", (np.array([zeros]), i64(1)))
        yield Call("ReduceProd", (np.array([zeros, [1.0, 4.0, 0.0]]), i64(0, 1)))
        for exclusive, reverse in itertools.product((0, 1), (0, 1)):
            attrs = {"exclusive": exclusive, "reverse": reverse}
            yield Call("CumProd", (np.array([zeros]), np.array(1, np.int64)), attrs, opset=26)
            yield Call("CumSum", (np.array([zeros]), np.array(1, np.int64)), attrs)
    yield Call("ReduceLogSumExp", (np.array([[-np.inf, -np.inf], [-np.inf, 1.0]]), i64(1)))
    for op, axis in itertools.product(("Softmax", "LogSoftmax"), (0, 1, 2)):
        yield Call(op, (3 * f(2, 3, 4),), {"axis": axis})
    for inverse, onesided in ((0, 0), (1, 0), (0, 1)):
        attrs = {"inverse": inverse, "onesided": onesided}
        x = f(2, 5, 1) if onesided else f(2, 5, 2)
        yield Call("DFT", (x, None, np.array(1, np.int64)), attrs)
        yield Call("DFT", (x, np.array(7, np.int64), np.array(1, np.int64)), attrs)
        yield Call("DFT", (x, np.array(4, np.int64), np.array(1, np.int64)), attrs)
    attrs = {"inverse": 1, "onesided": 1}
    for length in (6, 7):  # irfft takes the imaginary parts at the ends for 0
        x = f(2, 4, 2)
        yield Call("DFT", (x, np.array(length, np.int64), np.array(1, np.int64)), attrs)


def layers() -> Iterator[Call]:
    x = f(2, 4, 3)
    for axis in (-1, 1):
        rest = x.shape[axis:]
        yield Call("LayerNormalization", (x, f(*rest), f(*rest)), {"axis": axis}, 3)
        yield Call("RMSNormalization", (x, f(*rest)), {"axis": axis})
        for scale, bias in (((1,), (3,)), ((), (1, 3)), ((2, 1, 3), (4, 1)), ((1, 4, 1), None)):
            weights = (f(*scale), *([] if bias is None else [f(*bias)]))
            yield Call("LayerNormalization", (x, *weights), {"axis": axis}, 3)
    for shape in ((4, 6), (2, 6, 5), (2, 6, 3, 4), (2, 6, 2, 3, 2)):
        y, stats = f(*shape), (f(6), f(6), f(6), positive(6))
        yield Call("BatchNormalization", (y, *stats))
        yield Call("BatchNormalization", (y, *stats), {"training_mode": 1, "momentum": 0.7}, 3)
        if len(shape) > 2:
            yield Call("InstanceNormalization", (y, f(6), f(6)))
            for groups in (1, 2, 6):
                yield Call("GroupNormalization", (y, f(6), f(6)), {"num_groups": groups})
    for axis, p in itertools.product((0, 1, -1), (1, 2)):
        yield Call("LpNormalization", (x,), {"axis": axis, "p": p})
    zeros = np.array([[0.0, 0.0], [3.0, 4.0]])
    yield Call("LpNormalization", (zeros,), kink=True)
    yield Call("LRN", (f(2, 6, 3, 3),), {"size": 3})
    yield Call("MeanVarianceNormalization", (f(2, 3, 4, 4),))
    labels = np.array([[0, 3, 2], [1, 1, 0]], np.int64)
    for op, reduction in itertools.product(
        ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), ("mean", "sum", "none")
    ):
        for weight, ignored in itertools.product((None, positive(4)), (None, 1)):
            attrs: dict[str, Any] = {"reduction": reduction}
            attrs |= {} if ignored is None else {"ignore_index": ignored}
            yield Call(op, (f(2, 4, 3), labels, weight), attrs)


def attention() -> Iterator[Call]:
    q, k, v = f(2, 4, 3, 6), f(2, 2, 5, 6), f(2, 2, 5, 3)
    mask = np.array([[True, True, False, True, False]] * 3)
    forms: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}), ((), {"is_causal": 1}), ((), {"scale": 0.3}), ((), {"softcap": 2.0}),
        ((mask,), {}), ((f(2, 1, 3, 5),), {}), ((mask,), {"is_causal": 1, "softcap": 1.5}),
        ((None, f(2, 2, 2, 6), f(2, 2, 2, 3)), {"is_causal": 1}),
        ((f(3, 7), f(2, 2, 2, 6), f(2, 2, 2, 3)), {"softcap": 3.0}),
        ((None, None, None, i64(5, 2)), {"is_causal": 1}),
    ]  # fmt: skip
    for more, attrs in forms:
        yield Call("Attention", (q, k, v, *more), attrs)
    yield Call("Attention", (q, k, v, np.zeros((3, 5), bool)), kink=True)
    heads = {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1}
    yield Call("Attention", (f(2, 3, 24), f(2, 5, 12), f(2, 5, 6)), heads)
    for window in ({"left_window_size": 1}, {"left_window_size": 1, "right_window_size": 1},
                   {"right_window_size": 0, "softcap": 2.0}):  # fmt: skip
        yield Call("Attention", (q, k, v), window, opset=28)
    cos, sin, at = f(7, 3), f(7, 3), np.array([[0, 2, 6], [1, 1, 5]], np.int64)
    for interleaved in (0, 1):
        attrs = {"interleaved": interleaved}
        yield Call("RotaryEmbedding", (f(2, 4, 3, 6), cos, sin, at), attrs)
        half = {**attrs, "rotary_embedding_dim": 6, "num_heads": 2}
        yield Call("RotaryEmbedding", (f(2, 3, 16), f(2, 3, 3), f(2, 3, 3)), half)


def every() -> list[Call]:
    made = (windows, samples, recurrent, indexed, pointwise, reduced, layers, attention)
    return [call for family in made for call in family()]
