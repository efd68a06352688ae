"""Elementwise ops of the ONNX standard; operands broadcast as in numpy."""

from __future__ import annotations

from onward.graph.graph import content_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import standard
from onward.graph.types import DType, Size, Type, broadcast, divide


def _same(call: Call) -> Type:
    if call.op_type == "Identity":
        call.content = content_of(call.inputs[0])
    return call.type()


def _arithmetic(op: str, a: Size, b: Size) -> Size | None:
    match op:
        case "Add":
            return a + b
        case "Sub":
            return a - b
        case "Mul":
            return a * b
        case "Div":
            if isinstance(a, int) and isinstance(b, int):  # integers divide towards zero
                return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            return divide(a, b)
        case _:
            return None


def _elementwise(call: Call) -> Type:
    left = call.type()
    if call.op_type not in ("Pow",):
        for i in range(1, len(call.inputs)):
            if call.type(i).dtype != left.dtype:
                raise ValueError(f"{call.op_type}({left}, {call.type(i)}): element types differ")
    shape = broadcast(*[call.shape(i) for i in range(len(call.inputs))])
    if left.dtype == DType.INT64 and len(call.inputs) == 2:
        a, b = content_of(call.inputs[0]), content_of(call.inputs[1])
        if a and b:
            n = max(len(a), len(b))
            pairs = zip(a * (n // len(a)), b * (n // len(b)), strict=True)
            sizes = [_arithmetic(call.op_type, x, y) for x, y in pairs]
            if all(s is not None for s in sizes):
                call.content = tuple(s for s in sizes if s is not None)
    return Type(left.dtype, shape)


def _compare(call: Call) -> Type:
    return Type(DType.BOOL, broadcast(call.shape(0), call.shape(1)))


def _classify(call: Call) -> Type:
    return Type(DType.BOOL, call.shape())


def _where(call: Call) -> Type:
    return Type(call.type(1).dtype, broadcast(call.shape(0), call.shape(1), call.shape(2)))


def _cast(call: Call) -> Type:
    to = DType(int(call.attrs["to"]))
    if to == DType.INT64:
        call.content = content_of(call.inputs[0])
    return Type(to, call.shape())


OPS = (
    *standard(
        _same, "Identity", elementwise=True, view=True
    ),
    *standard(
        _same, "Neg", "Abs", "Sqrt", "Exp", "Log", "Tanh", "Erf", "Sigmoid", "Relu", "Sin", "Cos",
        "Reciprocal", "Sign", "Gelu", "Not", "Floor", "Ceil", "Round", "BitwiseNot", "Clip",
        "Softplus", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh",
        elementwise=True,
    ),
    *standard(
        _elementwise, "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Mod", "BitwiseXor",
        "BitwiseAnd", "BitwiseOr", "BitShift", elementwise=True,
    ),
    *standard(
        _compare, "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor",
        elementwise=True,
    ),
    *standard(_classify, "IsNaN", "IsInf", elementwise=True),
    *standard(_where, "Where", elementwise=True),
    *standard(_cast, "Cast", elementwise=True),
)  # fmt: skip
