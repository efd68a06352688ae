"""Elementwise ops; each may overwrite an input of the result's size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch

KERNELS: dict[str, Kernel] = {}
_LINEAR = 40.0  # above it softplus(x) = x, even in double precision


def _out(function: Callable[..., Any], arity: int) -> Callable[[KernelArguments], Launch]:
    def bind(args: KernelArguments) -> Launch:
        return partial(function, *[args.x(i) for i in range(arity)], out=args.y)

    return bind


for _op, _function in {
    "Neg": torch.neg, "Abs": torch.abs, "Sqrt": torch.sqrt, "Exp": torch.exp, "Log": torch.log,
    "Tanh": torch.tanh, "Erf": torch.erf, "Sigmoid": torch.sigmoid, "Sin": torch.sin,
    "Cos": torch.cos, "Reciprocal": torch.reciprocal, "Sign": torch.sign, "Floor": torch.floor,
    "Ceil": torch.ceil, "Round": torch.round, "Not": torch.logical_not, "Tan": torch.tan,
    "Asin": torch.asin, "Acos": torch.acos, "Atan": torch.atan, "Sinh": torch.sinh,
    "Cosh": torch.cosh, "Asinh": torch.asinh, "Acosh": torch.acosh, "Atanh": torch.atanh,
    "Log1p": torch.log1p, "Expm1": torch.expm1, "BitwiseNot": torch.bitwise_not,
}.items():  # fmt: skip
    KERNELS[_op] = Kernel(f"aten.{_op}", _out(_function, 1), inplace=((0, 0),))

for _op, _function in {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Pow": torch.pow, "Max": torch.maximum,
    "Min": torch.minimum, "Equal": torch.eq, "Less": torch.lt, "LessOrEqual": torch.le,
    "Greater": torch.gt, "GreaterOrEqual": torch.ge, "And": torch.logical_and,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseXor": torch.bitwise_xor, "BitwiseOr": torch.bitwise_or,
}.items():  # fmt: skip
    KERNELS[_op] = Kernel(f"aten.{_op}", _out(_function, 2), inplace=((0, 0), (0, 1)))


def _bind_div(args: KernelArguments) -> Launch:
    """Binds Div; as in ONNX, integer division rounds towards zero."""
    mode = None if args.y.is_floating_point() else "trunc"
    return partial(torch.div, args.x(0), args.x(1), rounding_mode=mode, out=args.y)


def _bind_mod(args: KernelArguments) -> Launch:
    """Binds Mod: the result has the divisor's sign, with `fmod` the dividend's."""
    function = torch.fmod if args.attrs.get("fmod", 0) else torch.remainder
    return partial(function, args.x(0), args.x(1), out=args.y)


def _bind_is_nan(args: KernelArguments) -> Launch:
    return partial(torch.ne, args.x(), args.x(), out=args.y)


def _bind_is_inf(args: KernelArguments) -> Launch:
    x, y, (negative,) = args.x(), args.y, args.scratch

    def launch() -> None:
        torch.isposinf(x, out=y)
        torch.isneginf(x, out=negative)
        y.logical_or_(negative)

    return launch


def _both_signs(spec: KernelSpec) -> str | None:
    signs = (spec.attrs.get("detect_negative", 1), spec.attrs.get("detect_positive", 1))
    return None if all(signs) else "IsInf of one sign"


def _bind_where(args: KernelArguments) -> Launch:
    return partial(torch.where, args.x(0), args.x(1), args.x(2), out=args.y)


def _bind_copy(args: KernelArguments) -> Launch:
    return partial(args.y.copy_, args.x())


def _bind_gelu(args: KernelArguments) -> Launch:
    kind = args.attrs.get("approximate", "none")
    return partial(torch.ops.aten.gelu.out, args.x(), approximate=kind, out=args.y)


def _bind_gelu_grad(args: KernelArguments) -> Launch:
    return partial(
        torch.ops.aten.gelu_backward.grad_input,
        args.x(0),
        args.x(1),
        approximate=args.attrs.get("approximate", "none"),
        grad_input=args.y,
    )


def _bind_relu(args: KernelArguments) -> Launch:
    return partial(torch.clamp, args.x(), min=0.0, out=args.y)


def _bind_trilu(args: KernelArguments) -> Launch:
    function = torch.triu if args.attrs.get("upper", 1) else torch.tril
    k = int(args.x(1)) if len(args.inputs) > 1 and args.inputs[1] is not None else 0
    return partial(function, args.x(0), diagonal=k, out=args.y)


def _two_inputs(spec: KernelSpec) -> str | None:
    return None if len(spec.inputs) == 2 else f"{spec.op} of {len(spec.inputs)} inputs"


def _bind_softplus(args: KernelArguments) -> Launch:
    return partial(torch.ops.aten.softplus.out, args.x(), 1, _LINEAR, out=args.y)


KERNELS |= {
    "Softplus": Kernel("aten.softplus", _bind_softplus, inplace=((0, 0),)),
    "Div": Kernel("aten.div", _bind_div, inplace=((0, 0), (0, 1))),
    "Mod": Kernel("aten.remainder", _bind_mod, inplace=((0, 0), (0, 1))),
    "IsNaN": Kernel("aten.ne", _bind_is_nan),
    "IsInf": Kernel(
        "aten.isposinf+isneginf",
        _bind_is_inf,
        unsupported=_both_signs,
        scratch=lambda spec: list(spec.outputs),
    ),
    "Where": Kernel("aten.where", _bind_where, inplace=((0, 1), (0, 2))),
    "Cast": Kernel("aten.copy", _bind_copy),
    "Identity": Kernel("aten.copy", _bind_copy),
    "Relu": Kernel("aten.clamp", _bind_relu, inplace=((0, 0),)),
    "Gelu": Kernel("aten.gelu", _bind_gelu, inplace=((0, 0),), contiguous=(0,)),
    "GeluGrad": Kernel(
        "aten.gelu_backward", _bind_gelu_grad, inplace=((0, 0), (0, 1)), contiguous=(0, 1)
    ),
    "Trilu": Kernel("aten.trilu", _bind_trilu),
}
for _op in ("Max", "Min"):
    KERNELS[_op] = Kernel(
        KERNELS[_op].name, KERNELS[_op].bind, unsupported=_two_inputs, inplace=((0, 0), (0, 1))
    )
