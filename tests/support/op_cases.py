"""Sample calls of ops, one table for all that enumerates them: type rules, kernels, gradients.

A call says what each input is; its `graph` and `feeds` are made in any element type.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import ctc_calls
import numpy as np
from update_operands import sample

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value
from onward.graph.ops import OWN
from onward.graph.types import DType, Type, parse_type


@dataclass(frozen=True)
class Real:
    """Real numbers drawn evenly from a range; the gradient goes to these."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    accumulated: bool = False  # f32 where the others are of less


@dataclass(frozen=True)
class Whole:
    """Integers `low <= n < high`, known only when the graph runs."""

    shape: tuple[int, ...]
    low: int
    high: int


@dataclass(frozen=True)
class Bits:
    """Booleans."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Given:
    """A run-time input of this very content."""

    array: np.ndarray
    accumulated: bool = False  # f32 where the others are of less


@dataclass(frozen=True)
class Known:
    """A constant of the graph."""

    array: np.ndarray


@dataclass(frozen=True)
class Double:
    """A run-time input f64[], whatever the element type of the others."""

    number: float


Input = Real | Whole | Bits | Given | Known | Double | None


@dataclass(frozen=True)
class OpCase:
    """One call of one op."""

    op: str
    inputs: tuple[Input, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        return self.label

    def graph(self, dtype: DType = DType.FLOAT) -> Graph:
        """Inputs `x0`, `x1`, ... and outputs `y0`, `y1`, ...; real inputs have type `dtype`."""
        graph = Graph(self.op)
        values: list[Value | None] = []
        for i, item in enumerate(self.inputs):
            match item:
                case None:
                    values.append(None)
                case Known(array):
                    values.append(graph.constant(_typed(array, dtype)))
                case _:
                    array = self.drawn(i, dtype)
                    type = Type(DType.from_numpy(array.dtype), array.shape)
                    values.append(graph.input(f"x{i}", type, Role.BATCH))
        made = Builder(graph, module="model.layer").node(self.op, values, self.attrs)
        outputs = made if isinstance(made, tuple) else (made,)
        graph.outputs = {f"y{i}": y for i, y in enumerate(outputs)}
        return graph

    def feeds(self, dtype: DType = DType.FLOAT) -> dict[str, np.ndarray]:
        return {
            f"x{i}": self.drawn(i, dtype)
            for i, item in enumerate(self.inputs)
            if item is not None and not isinstance(item, Known)
        }

    @property
    def real(self) -> list[str]:
        """Names of the inputs that are real numbers."""
        return [f"x{i}" for i, item in enumerate(self.inputs) if isinstance(item, Real)]

    def drawn(self, i: int, dtype: DType) -> np.ndarray:
        rng = np.random.default_rng([zlib.crc32(self.label.encode()), i])
        match self.inputs[i]:
            case Real(shape, low, high, accumulated):
                return _typed(np.asarray(rng.uniform(low, high, shape)), dtype, accumulated)
            case Whole(shape, low, high):
                return np.asarray(rng.integers(low, high, shape))
            case Bits(shape):
                return np.asarray(rng.integers(0, 2, shape) > 0)
            case Given(array, accumulated):
                return _typed(array, dtype, accumulated)
            case Double(number):
                return np.array(number)
            case other:
                raise TypeError(f"nothing to draw for {other}")


def _typed(array: np.ndarray, dtype: DType, accumulated: bool = False) -> np.ndarray:
    own = Type(dtype, ()).accumulated.dtype if accumulated else dtype
    return array.astype(own.numpy()) if array.dtype.kind == "f" else array


def r(*shape: int, low: float = -2.0, high: float = 2.0) -> Real:
    return Real(shape, low, high)


def ids(*shape: int, below: int) -> Whole:
    return Whole(shape, 0, below)


def ints(*numbers: int) -> Known:
    return Known(np.array(numbers, dtype=np.int64))


def number(x: float) -> Known:
    return Known(np.array(x))


def whole(n: int) -> Known:
    return Known(np.array(n, dtype=np.int64))


def _case(op: str, *inputs: Input, **attrs: Any) -> OpCase:
    return OpCase(op, inputs, {k: v for k, v in attrs.items() if v is not None})


def _unary() -> list[OpCase]:
    out: list[OpCase] = []
    for op in ("Identity", "Neg", "Abs", "Exp", "Tanh", "Erf", "Sigmoid", "Relu", "Sin", "Cos",
               "Sign", "Floor", "Ceil", "Round", "Softplus", "Atan", "Sinh", "Cosh",
               "Asinh"):  # fmt: skip
        out += [_case(op, r(3, 5)), _case(op, r())]
    for op in ("Sqrt", "Log", "Reciprocal"):
        out += [_case(op, r(7, low=0.3)), _case(op, r(2, 1, 3, low=0.3))]
    for op in ("Tan", "Asin", "Acos", "Atanh"):
        out += [_case(op, r(3, 5, low=-0.9, high=0.9)), _case(op, r(low=-0.5, high=0.5))]
    out += [_case("Acosh", r(3, 5, low=1.1, high=3)), _case("Acosh", r(low=1.1, high=2))]
    out.append(_case("Reciprocal", r(3, 3, low=-2, high=-0.5)))
    for kind in ("none", "tanh"):
        out += [_case("Gelu", r(3, 5), approximate=kind), _case("Gelu", r(33), approximate=kind)]
    out.append(_case("Gelu", r(2, 3)))
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -1.5])
    out += [_case("IsNaN", Given(odd)), _case("IsInf", Given(odd))]
    out += [_case("Not", Bits((3, 5))), _case("BitwiseNot", Whole((4,), -9, 9))]
    return out


def _binary() -> list[OpCase]:
    out: list[OpCase] = []
    shapes = [
        ((3, 5), (3, 5)), ((3, 5), (5,)), ((3, 1), (1, 5)), ((1,), (2, 3)), ((2, 3), ()),
        ((), ()), ((4, 1, 3), (2, 1)), ((1, 3), (1, 3)), ((3, 1, 1), (1, 1, 1)),
    ]  # fmt: skip
    for op in ("Add", "Sub", "Mul", "Max", "Min"):
        out += [_case(op, r(*a), r(*b)) for a, b in shapes]
    for a, b in shapes:
        out += [
            _case("Div", r(*a), r(*b, low=0.5)),
            _case("Pow", r(*a, low=0.3), r(*b)),
        ]
    out.append(_case("Div", r(3, 5), r(3, 5, low=-2, high=-0.5)))
    for exponent in (2.0, 3.0, 1.0, 0.0, -1.0):
        base = r(2, 3) if exponent >= 0 else r(2, 3, low=0.3)
        out.append(_case("Pow", base, number(exponent)))
    out.append(_case("Pow", r(2, 3, low=0.3), number(0.5)))
    out.append(_case("Pow", Given(np.array([0.0, 1.0, 2.0])), number(2.0)))
    for op in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"):
        out += [
            _case(op, Whole((3, 5), 0, 3), Whole((3, 5), 0, 3)),
            _case(op, Whole((3, 1), 0, 3), Whole((5,), 0, 3)),
            _case(op, r(3, 5), r(5)),
        ]
    for op in ("And", "Or", "Xor"):
        out += [_case(op, Bits((3, 5)), Bits((3, 5))), _case(op, Bits((3, 1)), Bits((5,)))]
    for op in ("Add", "Sub", "Mul", "BitwiseAnd", "BitwiseOr", "BitwiseXor"):
        out.append(_case(op, Whole((3, 5), -9, 9), Whole((3, 5), -9, 9)))
    out += [
        _case("Div", Whole((3, 5), -9, 9), Whole((5,), 1, 4)),  # towards zero
        _case("Div", Whole((3, 5), -9, 9), Whole((5,), -4, -1)),
        _case("Mod", Whole((3, 5), -9, 9), Whole((5,), 1, 4)),  # the divisor's sign
        _case("Mod", Whole((3, 5), -9, 9), Whole((5,), -4, -1)),
        _case("Mod", Whole((3, 5), -9, 9), Whole((3, 5), 1, 4)),
        _case("Mod", Whole((3, 5), -9, 9), Whole((5,), 1, 4), fmod=1),  # the dividend's sign
        _case("Mod", r(3, 5), r(5, low=0.5), fmod=1),
        _case("BitShift", Given(np.arange(6, dtype=np.uint64)), Given(np.ones(6, np.uint64)),
              direction="LEFT"),
        _case("Where", Bits((3, 5)), r(3, 5), r(3, 5)),
        _case("Where", Bits((3, 1)), r(1, 5), r(3, 5)),
        _case("Where", Bits((5,)), r(3, 5), r()),
        _case("Where", Bits((2, 3)), r(), r(3)),
        _case("Max", r(3, 5)), _case("Max", r(3, 5), r(5), r()), _case("Min", r(2), r(2), r(2)),
        _case("Clip", r(3, 5), number(-0.5), number(1.0)), _case("Clip", r(4), None, number(0.5)),
    ]  # fmt: skip
    return out


def _shapes() -> list[OpCase]:
    return [
        _case("Cast", r(3, 5), to=DType.INT64),
        _case("Cast", r(3, 5), to=DType.DOUBLE),
        _case("Cast", r(3, 5), to=DType.FLOAT),
        _case("Cast", Given(np.array([0.0, -0.5, 2.0])), to=DType.BOOL),
        _case("Cast", Bits((3, 5)), to=DType.FLOAT),
        _case("Cast", Whole((4,), -5, 5), to=DType.FLOAT),
        _case("Shape", r(3, 5, 2)),
        _case("Shape", r(3, 5, 2), start=1, end=2),
        _case("Shape", r(3, 5, 2), start=-2),
        _case("Reshape", r(3, 4), ints(2, 6)),
        _case("Reshape", r(3, 4, 2), ints(0, -1)),
        _case("Reshape", r(3, 4), ints(-1)),
        _case("Reshape", r(1), Known(np.zeros(0, np.int64))),
        _case("Transpose", r(3, 4), perm=[1, 0]),
        _case("Transpose", r(2, 3, 4), perm=[2, 0, 1]),
        _case("Transpose", r(2, 3, 4)),
        _case("Unsqueeze", r(3, 4), ints(0)),
        _case("Unsqueeze", r(3, 4), ints(-1)),
        _case("Unsqueeze", r(3, 4), ints(1, 3)),
        _case("Unsqueeze", r(), ints(0)),
        _case("Squeeze", r(1, 3, 1), ints(0)),
        _case("Squeeze", r(1, 3, 1), ints(-1, 0)),
        _case("Squeeze", r(1, 3, 1)),
        _case("Expand", r(3, 1), ints(3, 4)),
        _case("Expand", r(3, 1), ints(2, 1, 4)),
        _case("Expand", r(), ints(2, 3)),
        _case("Expand", r(2, 3), ints(1)),
        _case("Expand", r(1, 1), ints(1, 1)),
        _case("Concat", r(3, 2), r(3, 1), axis=1),
        _case("Concat", r(1, 2), r(3, 2), r(2, 2), axis=-2),
        _case("Concat", r(3, 2), axis=0),
        _case("Split", r(3, 6), ints(1, 2, 3), axis=1),
        _case("Split", r(4, 2), ints(1, 3)),
        _case("Split", r(2, 3, 4), ints(2, 2), axis=-1),
        _case("Slice", r(5, 4), ints(1), ints(3), ints(0), ints(1)),
        _case("Slice", r(5, 4), ints(-3, 0), ints(2**62, -1), ints(0, -1), ints(1, 1)),
        _case("Slice", r(5, 4), ints(1, 2), ints(4, 9), ints(-1, 0)),
        _case("Slice", r(5, 4), ints(1, 2), ints(4, 3)),
        _case("Slice", r(5), ints(3), ints(2), ints(0)),
        _case("Pad", r(3, 2), ints(1, 0, 0, 2)),
        _case("Pad", r(3, 2), ints(0, 1, 2, 1), number(0.5)),
        _case("Pad", r(4), ints(0, 0), number(0.0)),
        _case("Range", whole(2), whole(9), whole(3)),
        _case("Range", whole(0), whole(5), whole(1)),
        _case("ConstantOfShape", ints(2, 3)),
        _case("Trilu", r(3, 5), whole(0), upper=1),
        _case("Trilu", r(2, 4, 4), whole(1), upper=0),
        _case("Trilu", r(4, 3), whole(-1), upper=0),
        _case("Trilu", r(4, 3)),
        _case("CumSum", r(3, 4), whole(1)),
        _case("CumSum", r(3, 4), whole(-2)),
        _case("CumSum", r(2, 3, 4), whole(0), reverse=1),
        _case("CumSum", r(5), whole(0), exclusive=1),
        _case("CumSum", r(3, 5), whole(-1), exclusive=1, reverse=1),
    ]


def _indexing() -> list[OpCase]:
    repeated = Given(np.array([[2, 0], [2, 2]]))
    pairs_of_two = Given(np.array([[0, 1], [1, 2], [0, 1]]))
    pairs = Given(np.array([[0, 1], [1, -1], [0, 1]]))  # one repeated, one from the end
    return [
        _case("Gather", r(4, 3), repeated),
        _case("Gather", r(4, 3), ids(5, below=4), axis=0),
        _case("Gather", r(2, 4, 3), repeated, axis=1),
        _case("Gather", r(2, 3), repeated, axis=-1),
        _case("Gather", r(4, 3), Given(np.array(2)), axis=0),
        _case("Gather", r(5), ids(2, 3, below=5)),
        _case("GatherElements", r(4, 3), ids(2, 3, below=4), axis=0),
        _case("GatherElements", r(2, 5), ids(2, 7, below=5), axis=1),
        _case("GatherElements", r(4, 3), ids(4, 3, below=4)),
        _case("GatherND", r(2, 3, 4), pairs),
        _case("GatherND", r(4, 3), Given(np.array([[1], [1], [3]]))),
        _case("GatherND", r(2, 3), Given(np.array([[[1, 1]], [[0, 2]]]))),
        _case("GatherND", r(2, 3, 4), Given(np.array([[1], [2]])), batch_dims=1),
        _case("ScatterND", r(4, 3), Given(np.array([[1], [1], [3]])), r(3, 3), reduction="add"),
        _case("ScatterND", r(4, 3), Given(np.array([[2], [0]])), r(2, 3)),
        _case("ScatterND", r(2, 3, 4), pairs, r(3, 4), reduction="add"),
        _case("ScatterND", r(2, 3), Given(np.array([[0, 1], [1, 2]])), r(2), reduction="none"),
        _case("ScatterElements", r(4, 3), ids(2, 3, below=4), r(2, 3), reduction="add", axis=0),
        _case("ScatterElements", r(2, 5), Given(np.array([[0, 2], [4, 1]])), r(2, 2), axis=-1),
        _case("ScatterElements", r(5), Given(np.array([3, 1])), r(2)),
        *(
            _case(
                "ScatterElements",
                r(3, 3, low=0.5),
                Given(np.array([[0, 2, 0], [0, 1, 2]])),
                r(2, 3, low=0.5),
                reduction=kind,
            )
            for kind in ("mul", "max", "min")
        ),
        *(
            _case(
                "ScatterND",
                r(4, 2, low=0.5),
                Given(np.array([[1], [1], [3]])),
                r(3, 2, low=0.5),
                reduction=kind,
            )
            for kind in ("mul", "max", "min")
        ),
        _case("ScatterND", r(2, 3), pairs_of_two, r(3), reduction="max"),
        _case(
            "ScatterElements",
            Given(np.array([0.0, 2.0, 0.0, 3.0])),
            Given(np.array([0, 1, 1, 3])),
            r(4),
            axis=0,
            reduction="mul",
        ),
        _case("NonZero", Known(np.array([[True, False, True], [False, True, False]]))),
        _case("OneHot", ids(4, below=3), whole(3), Known(np.array([0.0, 1.0]))),
        _case("TopK", r(3, 5), ints(2), axis=-1),
        _case("TopK", r(2, 4, 3), ints(3), axis=1, largest=0),
        _case("TopK", r(3, 5), ints(5), axis=1),
        _case("TopK", r(4), ints(4), axis=0, largest=0),
        _case("ArgMax", r(3, 5), axis=1),
        _case("ArgMax", r(3, 5), axis=-2, keepdims=0),
        _case("ArgMax", r(3, 5)),
    ]


def _reductions() -> list[OpCase]:
    out: list[OpCase] = []
    for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare",
               "ReduceProd"):  # fmt: skip
        for keep in (0, 1):
            out += [
                _case(op, r(3, 4), ints(1), keepdims=keep),
                _case(op, r(2, 3, 4), ints(0, -1), keepdims=keep),
                _case(op, r(2, 1, 3), ints(1), keepdims=keep),
                _case(op, r(3, 4), keepdims=keep),
            ]
        out += [_case(op, r(3, 4), ints(-2)), _case(op, r(5), ints(0), keepdims=0)]
        out.append(_case(op, r(3, 4), Known(np.zeros(0, np.int64))))  # no axes: all of them
    return out


def _products() -> list[OpCase]:
    out = [
        _case("MatMul", r(3, 4), r(4, 5)),
        _case("MatMul", r(2, 3, 4), r(2, 4, 5)),
        _case("MatMul", r(2, 3, 4), r(4, 5)),
        _case("MatMul", r(2, 1, 3, 4), r(5, 4, 2)),
        _case("MatMul", r(1, 3, 4), r(2, 4, 1)),
        _case("MatMul", r(3, 1), r(1, 2)),
    ]
    for ta in (0, 1):
        for tb in (0, 1):
            a, b = r(*((4, 3) if ta else (3, 4))), r(*((5, 4) if tb else (4, 5)))
            out += [
                _case("Gemm", a, b, r(5), transA=ta, transB=tb),
                _case("Gemm", a, b, transA=ta, transB=tb),
            ]
    for c in ((3, 5), (1, 5), (3, 1), ()):
        out.append(_case("Gemm", r(3, 4), r(4, 5), r(*c)))
    out.append(_case("Gemm", r(3, 4), r(4, 5), r(5), alpha=0.5, beta=2.0))
    out.append(_case("Gemm", r(4, 3), r(5, 4), alpha=0.5, transA=1, transB=1))
    return out


def _convolutions() -> list[OpCase]:
    """Sizes of each kind: one to three dims, steps that leave elements over, groups, one channel a
    group, holes, a kernel as large as its input, pads that differ (by onnx alone)."""
    both: list[tuple[Any, ...]] = [  # x, w of Conv, bias or not, attributes
        ((2, 3, 7), (4, 3, 3), True, {}),
        ((1, 2, 9), (2, 2, 4), False, {"strides": [3], "pads": [1, 1]}),
        ((2, 3, 5, 6), (4, 3, 3, 2), True, {"strides": [2, 1], "pads": [1, 0, 1, 0]}),
        ((2, 4, 7, 6), (6, 2, 2, 3), False, {"dilations": [2, 1], "strides": [3, 2], "group": 2}),
        ((1, 4, 5, 5), (4, 1, 3, 3), True, {"pads": [1] * 4, "group": 4}),
        ((2, 3, 8, 4), (5, 3, 4, 4), True, {"strides": [4, 4]}),
        ((2, 2, 3, 3), (3, 2, 3, 3), False, {}),
        ((2, 3, 2, 3), (2, 3, 1, 1), True, {}),
        ((1, 3, 3, 3, 2), (2, 3, 2, 1, 2), True, {"pads": [1, 0, 0, 1, 0, 0]}),
    ]
    out: list[OpCase] = []
    for x, w, bias, attrs in both:
        out.append(_case("Conv", r(*x), r(*w), *([r(w[0])] if bias else []), **attrs))
    out.append(_case("Conv", r(1, 2, 5), r(3, 2, 2), pads=[0, 1]))
    out.append(_case("Conv", r(2, 3, 70), r(3, 1, 4), r(3), pads=[3, 3], group=3))
    for x, w, bias, attrs in both:  # w turns channels of its first dim into those of its second
        if "group" not in attrs:  # onnx's evaluator has them wrong; kernels/test_conv.py has these
            more = [r(w[1])] if bias else []
            out.append(_case("ConvTranspose", r(x[0], w[0], *x[2:]), r(*w), *more, **attrs))
    out += [
        _case("ConvTranspose", r(2, 3, 4), r(3, 2, 3), strides=[2], output_padding=[1]),
        _case("ConvTranspose", r(1, 2, 4), r(2, 3, 2), pads=[0, 1]),
        _case("ConvTranspose", r(2, 1, 40), r(1, 1, 4), r(1), pads=[1, 1]),
    ]  # fmt: skip
    for shape, attrs in (
        ((2, 2, 7, 5), {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0]}),
        ((1, 3, 6, 6), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ((1, 1, 8, 7), {"kernel_shape": [3, 3], "dilations": [2, 1], "strides": [1, 2]}),
    ):  # over other than two dims onnx's evaluator numbers each plane: kernels/test_conv.py
        out.append(_case("MaxPool", r(*shape), **attrs))
    return out


def _composites() -> list[OpCase]:
    out: list[OpCase] = []
    for op in ("Softmax", "LogSoftmax"):
        out += [
            _case(op, r(3, 5), axis=-1), _case(op, r(2, 3, 17), axis=2), _case(op, r(4)),
            _case(op, r(3, 1), axis=1), _case(op, r(3, 5), axis=0), _case(op, r(2, 3, 4), axis=1),
        ]  # fmt: skip
    for axis, shape, normal in (
        (-1, (3, 8), (8,)), (2, (2, 3, 5), (5,)), (1, (2, 3, 4), (3, 4)), (-1, (3, 1), (1,)),
        (0, (7,), (7,)), (0, (2, 3), (2, 3)),
    ):  # fmt: skip
        out += [
            _case(
                "LayerNormalization",
                r(*shape),
                r(*normal),
                r(*normal),
                axis=axis,
                epsilon=None if shape == (3, 8) else 2.0**-8,
            ),
            _case("LayerNormalization", r(*shape), r(*normal), axis=axis, epsilon=2.0**-10),
        ]
    for shape in ((4, 3), (2, 3, 5), (2, 3, 4, 2), (1, 2, 3, 1, 2)):
        (each,) = shape[1:2]
        inputs = (r(*shape), r(each), r(each), r(each), r(each, low=0.2))
        out.append(_case("BatchNormalization", *inputs))
        for momentum in (0.75, 0.0, 0.25):
            attrs = {"training_mode": 1, "momentum": momentum, "epsilon": 2.0**-10}
            out.append(_case("BatchNormalization", *inputs, **attrs))
    labels = Given(np.array([4, 0, 2, 4]))
    weight = Known(np.array([0.5, 1.0, 2.0, 1.5, 0.25]))
    for reduction in ("mean", "sum", "none"):
        for ignore in (-100, 2, 4):
            attrs = {"reduction": reduction, "ignore_index": ignore}
            out += [
                OpCase("SoftmaxCrossEntropyLoss", (r(4, 5), labels), attrs),
                OpCase("SoftmaxCrossEntropyLoss", (r(4, 5), labels, weight), attrs),
            ]
    out.append(_case("SoftmaxCrossEntropyLoss", r(4, 5), labels))
    out.append(_case("SoftmaxCrossEntropyLoss", r(1, 5), Given(np.array([2])), reduction="mean"))
    deep = Given(np.array([[1, 0, 2, 2], [0, 2, 1, 1]]))
    for reduction in ("mean", "sum", "none"):
        out.append(
            _case("SoftmaxCrossEntropyLoss", r(2, 3, 4), deep, reduction=reduction, ignore_index=1)
        )
    return out


def _labelled(cases: list[OpCase]) -> tuple[OpCase, ...]:
    count: Counter[str] = Counter()
    out: list[OpCase] = []
    for case in cases:
        count[case.op] += 1
        out.append(OpCase(case.op, case.inputs, case.attrs, f"{case.op}-{count[case.op]}"))
    return tuple(out)


def _onward() -> list[OpCase]:
    """The sample calls in the ops' records. What an integer input means is said here."""
    out: list[OpCase] = []
    for op in OWN.values():
        for attrs, types in op.cases:
            parsed = [None if t is None else parse_type(t) for t in types]
            inputs = tuple(_of_type(op.name, i, parsed, attrs) for i in range(len(parsed)))
            out.append(OpCase(op.name, inputs, attrs))
    return out


# Coordinates of packed rows. A query of sequence 0 lies before its keys, sequence 1 has no keys and
# 2 no queries; a key within sequence 0 is hidden.
_QUERY_PLACES = np.array([[0, 0], [0, 3], [1, 1], [3, 0], [3, 2]])
_KEY_PLACES = np.array([[0, 1], [-1, 0], [0, 2], [2, 0], [3, 0], [3, 1]])


def _of_type(op: str, i: int, types: list[Type | None], attrs: dict[str, Any]) -> Input:
    type = types[i]
    if type is None:
        return None
    known = sample(op, i, attrs)
    if isinstance(known, float):
        return Double(known)
    shape = tuple(int(n) for n in type.shape if isinstance(n, int))
    if known is not None and type.dtype != DType.UINT8:
        return Given(np.array(known)) if isinstance(known, int) else Real(shape, *known)
    if type.dtype == DType.BOOL:
        bits = np.random.default_rng(i).integers(0, 3, shape) > 0
        bits.reshape(-1, shape[-1])[0] = False  # a row with nothing allowed
        return Given(bits)
    if type.dtype == DType.UINT8:  # codes: each of them, and 128, which stands for no number
        return Given(np.arange(np.prod(shape)).reshape(shape).astype(np.uint8))
    if type.dtype == DType.INT64:
        match op, i:
            case ("Embedding", 1):
                rows = types[0].shape[0] if types[0] is not None else 0
                return Whole(shape, 0, int(rows))  # type: ignore[arg-type]
            case ("InRange", 0):
                return Whole(shape, 0, 9)
            case ("InRange", 1):
                return Given(np.array(9))
            case ("GroupedMatMul" | "GroupedOuter", _):  # one without rows, and rows without one
                return Given(np.array({3: [2, 2, 5], 4: [0, 1, 4, 6]}[shape[0]]))
            case ("SoftmaxCrossEntropyLossGrad", 2) | ("CrossEntropyLoss", 1):
                labels = np.arange(int(np.prod(shape))).reshape(shape) % 5
                labels.reshape(-1)[-1] = attrs.get("ignore_index", -100)
                return Given(labels)
            case (own, _) if own.startswith("LinearCrossEntropy"):
                labels = np.arange(int(np.prod(shape))).reshape(shape) % 4
                labels[-1] = attrs["ignore_index"]
                return Given(labels)
            case ("MaxPoolGrad", 1):  # each plane's own elements
                planes, inner = shape[0] * shape[1], int(np.prod(attrs["sizes"]))
                local = np.random.default_rng(0).integers(0, inner, (planes, *shape[2:]))
                starts = np.arange(planes).reshape(planes, *[1] * len(shape[2:])) * inner
                return Given((local + starts).reshape(shape))
            case ("CTCLoss" | "CTCLossGrad", _):
                x = types[0] if op == "CTCLoss" else types[1]
                assert x is not None
                return Given(ctc_calls.whole(x.shape, attrs, shape, i - (op == "CTCLossGrad")))
            case ("Attention" | "FlashAttention", 6 | 7) | ("FlashAttentionGrad", 10 | 11):
                rows = _QUERY_PLACES if i in (6, 10) else _KEY_PLACES
                assert rows.shape == shape
                return Given(rows)
            case _:
                return Whole(shape, 0, 2**32 if shape == (2,) else 1000)
    match op, i:
        case ("Log1p", _):
            return Real(shape, -0.9, 2.0)
        case ("LayerNormalizationGrad" | "BatchNormalizationGrad" | "GroupNormGrad", 4):
            return Real(shape, 0.1, 2.0)  # 1/std
        case ("FlashAttentionGrad", 8 | 9 | 13):  # highest score, sum of its exponentials, delta
            ends = {8: (2.0, 4.0), 9: (4.0, 6.0), 13: (-2.0, 2.0)}[i]
            return Real(shape, *ends, accumulated=True)
        case ("SoftmaxCrossEntropyLossGrad", 1):
            return Real(shape, -4.0, -0.1)  # log-probabilities
        case ("SoftmaxCrossEntropyLossGrad", 3):
            return Real(shape, 0.2, 2.0)
        case ("LinearCrossEntropy", 4) | ("LinearCrossEntropyGrad" | "LinearCrossEntropyStep", 5):
            return Given(np.linspace(0.3, 1.8, shape[0]))  # class weights take no gradient
        case ("CrossEntropyLoss", 2):
            return Known(np.linspace(0.25, 2.0, shape[0]))
        case _:
            return Real(shape)


CASES = _labelled(
    _unary() + _binary() + _shapes() + _indexing() + _reductions() + _products() + _convolutions()
    + _composites()
)  # fmt: skip
ONWARD_CASES = _labelled(_onward())


def cases_of(*ops: str) -> list[OpCase]:
    """Sample calls of these ops; raises AssertionError where there is none."""
    found = [case for case in CASES + ONWARD_CASES if case.op in ops]
    assert {case.op for case in found} == set(ops)
    return found


def stopped(b: Builder, x: Value) -> Value:
    """`x`, through which no gradient passes: what a capture makes of `detach`."""
    y: Value = b.StopGradient(x)
    return y
