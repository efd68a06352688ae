"""Elementwise ops; every one may overwrite an input of the result's own size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from onward.kernels.kernel import Kernel, Launch, Need, Use

KERNELS: dict[str, Kernel] = {}


def _out(function: Callable[..., Any], arity: int) -> Callable[[Use], Launch]:
    def bind(use: Use) -> Launch:
        return partial(function, *[use.x(i) for i in range(arity)], out=use.y)

    return bind


for _op, _function in {
    "Neg": torch.neg, "Abs": torch.abs, "Sqrt": torch.sqrt, "Exp": torch.exp, "Log": torch.log,
    "Tanh": torch.tanh, "Erf": torch.erf, "Sigmoid": torch.sigmoid, "Sin": torch.sin,
    "Cos": torch.cos, "Reciprocal": torch.reciprocal, "Sign": torch.sign, "Floor": torch.floor,
    "Ceil": torch.ceil, "Not": torch.logical_not,
}.items():  # fmt: skip
    KERNELS[_op] = Kernel(f"aten.{_op}", _out(_function, 1), inplace=((0, 0),))

for _op, _function in {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Pow": torch.pow, "Max": torch.maximum,
    "Min": torch.minimum, "Equal": torch.eq, "Less": torch.lt, "LessOrEqual": torch.le,
    "Greater": torch.gt, "GreaterOrEqual": torch.ge, "And": torch.logical_and,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseXor": torch.bitwise_xor,
}.items():  # fmt: skip
    KERNELS[_op] = Kernel(f"aten.{_op}", _out(_function, 2), inplace=((0, 0), (0, 1)))


def _bind_div(use: Use) -> Launch:
    """ONNX divides integers towards zero."""
    mode = None if use.y.is_floating_point() else "trunc"
    return partial(torch.div, use.x(0), use.x(1), rounding_mode=mode, out=use.y)


def _bind_mod(use: Use) -> Launch:
    """The result has the divisor's sign; with `fmod` the dividend's."""
    function = torch.fmod if use.attrs.get("fmod", 0) else torch.remainder
    return partial(function, use.x(0), use.x(1), out=use.y)


def _bind_is_nan(use: Use) -> Launch:
    return partial(torch.ne, use.x(), use.x(), out=use.y)


def _bind_is_inf(use: Use) -> Launch:
    x, y, (negative,) = use.x(), use.y, use.scratch

    def launch() -> None:
        torch.isposinf(x, out=y)
        torch.isneginf(x, out=negative)
        y.logical_or_(negative)

    return launch


def _both_signs(need: Need) -> str | None:
    signs = (need.attrs.get("detect_negative", 1), need.attrs.get("detect_positive", 1))
    return None if all(signs) else "IsInf of one sign"


def _bind_where(use: Use) -> Launch:
    return partial(torch.where, use.x(0), use.x(1), use.x(2), out=use.y)


def _bind_copy(use: Use) -> Launch:
    return partial(use.y.copy_, use.x())


def _bind_gelu(use: Use) -> Launch:
    kind = use.attrs.get("approximate", "none")
    return partial(torch.ops.aten.gelu.out, use.x(), approximate=kind, out=use.y)


def _bind_gelu_grad(use: Use) -> Launch:
    return partial(
        torch.ops.aten.gelu_backward.grad_input,
        use.x(0),
        use.x(1),
        approximate=use.attrs.get("approximate", "none"),
        grad_input=use.y,
    )


def _bind_relu(use: Use) -> Launch:
    return partial(torch.clamp, use.x(), min=0.0, out=use.y)


def _bind_trilu(use: Use) -> Launch:
    function = torch.triu if use.attrs.get("upper", 1) else torch.tril
    k = int(use.x(1)) if len(use.inputs) > 1 and use.inputs[1] is not None else 0
    return partial(function, use.x(0), diagonal=k, out=use.y)


def _two_inputs(need: Need) -> str | None:
    return None if len(need.inputs) == 2 else f"{need.op} of {len(need.inputs)} inputs"


KERNELS |= {
    "Div": Kernel("aten.div", _bind_div, inplace=((0, 0), (0, 1))),
    "Mod": Kernel("aten.remainder", _bind_mod, inplace=((0, 0), (0, 1))),
    "IsNaN": Kernel("aten.ne", _bind_is_nan),
    "IsInf": Kernel(
        "aten.isposinf+isneginf",
        _bind_is_inf,
        why_not=_both_signs,
        scratch=lambda need: list(need.outputs),
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
        KERNELS[_op].name, KERNELS[_op].bind, why_not=_two_inputs, inplace=((0, 0), (0, 1))
    )
