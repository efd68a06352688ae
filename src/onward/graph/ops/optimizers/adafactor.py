"""Adafactor (arXiv 1804.04235), in torch's form: of a matrix only means over rows and columns are
kept of its squared gradients.

s = t^beta2_decay     a = max(eps2, |p| / sqrt(n)) min(lr, 1 / sqrt(t))     p <- (1 - lr decay) p
rows <- rows + s (mean of g^2 over columns - rows)          columns likewise
v = rows columns / max(mean of rows, eps1)       (a vector: v <- v + s (g^2 - v))
u = g / sqrt(max(v, eps1^2))        p <- p - a u / max(1, |u| / (sqrt(n) d))

n is the number of elements. The Adafactor of transformers is another one, and is not this record:
it adds eps1 to g^2, divides by the means of rows as they are, has warm-up and relative steps in
place of `lr`, an optional first moment, and keeps no tensor of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import mixed, scaled, shrunk
from onward.graph.ops.optimizers.record import Group, Groups, Optimizer, setting
from onward.graph.ops.record import Op
from onward.graph.types import DType, Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class Adafactor:
    """Adafactor (arXiv 1804.04235), as `torch.optim.Adafactor`. `eps[0]` None: the smallest step
    from 1 in the parameter's dtype."""

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    maximize: bool = False
    groups: Groups = ()


_EPSILON = {DType.FLOAT: float(np.finfo(np.float32).eps), DType.DOUBLE: np.finfo(np.float64).eps}


def _root_mean_square(b: Builder, x: Value) -> Value:
    """The root of the mean of squares of all elements, f64[]."""
    count = math.prod(int(size) for size in type_of(x).shape)  # type: ignore[arg-type]
    norm = b.cast(b.ReduceL2(x, keepdims=0), DType.DOUBLE)
    return b.Div(norm, np.array(math.sqrt(max(count, 1))))


def _mean(b: Builder, x: Value, dim: int) -> Value:
    return b.ReduceMean(x, b.ints([dim]), keepdims=1)


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The body of Adafactor: `p'`, and `rows', columns'` or, of a vector, `v'`; of p's type."""
    rows, columns, variance = inputs[2:5]
    scale = inputs[12] if len(inputs) > 12 else None
    p, g, lr, power, least, floor, limit, decay, step = [
        x for x in (*inputs[:2], *inputs[5:12]) if x is not None
    ]
    dtype, one = type_of(p).dtype, np.array(1.0)
    g = scaled(b, g, scale)
    time = b.cast(step, DType.DOUBLE)
    share = b.Pow(time, power)
    pace = b.Min(lr, b.Div(one, b.Sqrt(time)))
    rate = b.Mul(b.Max(floor, _root_mean_square(b, p)), pace)
    p = shrunk(b, p, lr, decay)
    if attrs["own_epsilon"]:
        least = b.const(np.array(_EPSILON[dtype]))
    square = b.Mul(g, g)
    if variance is None:
        assert rows is not None and columns is not None
        rank = len(type_of(p).shape)
        rows = mixed(b, rows, _mean(b, square, rank - 1), share)
        columns = mixed(b, columns, _mean(b, square, rank - 2), share)
        middle = b.Max(_mean(b, rows, rank - 2), b.cast(least, dtype))
        estimate, kept = b.Div(b.Mul(rows, columns), middle), [rows, columns]
    else:
        estimate = mixed(b, variance, square, share)
        kept = [estimate]
    root = b.Sqrt(b.Max(estimate, b.cast(b.Mul(least, least), dtype)))
    u = b.Div(g, root)
    excess = b.Max(one, b.Div(_root_mean_square(b, u), limit))
    return [b.Sub(p, b.Mul(u, b.cast(b.Div(rate, excess), dtype))), *kept]


def _rows(parameter: Type) -> Type | None:
    """The type of the means over the last dim; None: a vector has none."""
    shape = parameter.shape
    return None if len(shape) < 2 else Type(parameter.dtype, (*shape[:-1], 1))


def _columns(parameter: Type) -> Type | None:
    """The type of the means over the last dim but one; None: a vector has none."""
    shape = parameter.shape
    return None if len(shape) < 2 else Type(parameter.dtype, (*shape[:-2], 1, shape[-1]))


def _of_vectors(parameter: Type) -> Type | None:
    """The type of the squares of a vector's elements; None: a matrix has none."""
    return parameter if len(parameter.shape) < 2 else None


def _infer(call: Any) -> list[Type]:
    return [call.type(0), *(call.type(i) for i in range(2, 5) if call.present(i))]


_P = "f32[4,6]"
_SCALARS = (*("f64[]",) * 6, "i64[]")

_UPDATE = Op(
    name="AdafactorUpdate",
    infer=_infer,
    body=_body,
    doc="p' and rows', columns' or, of a vector, v' of Adafactor. Inputs: p f[*,N,M], g f[*,N,M], "
    "rows f[*,N,1]?, columns f[*,1,M]?, v f[N]?, lr, beta2_decay, eps1, eps2, d, weight decay "
    "f64[], step i64[], scale f[]?. own_epsilon=1: eps1 is that of p's dtype.",
    cases=tuple(
        ({"own_epsilon": own}, (p, p, rows, columns, v, *_SCALARS, *scale))
        for p, rows, columns, v in (
            (_P, "f32[4,1]", "f32[1,6]", None),
            ("f32[2,4,6]", "f32[2,4,1]", "f32[2,1,6]", None),
            ("f32[6]", None, None, "f32[6]"),
        )
        for own, scale in ((0, ()), (1, ("f32[]",)))
    ),
)


def _attributes(group: Group) -> dict[str, Any]:
    return {"own_epsilon": int(group["eps"][0] is None)}


OPTIMIZERS = (
    Optimizer(
        description=Adafactor,
        torch="torch.optim.Adafactor",
        update=_UPDATE,
        slots=("row_var", "col_var", "variance"),
        hyperparameters={
            "lr": setting("lr"),
            "beta2_decay": setting("beta2_decay"),
            "eps1": lambda group: group["eps"][0] or 0.0,
            "eps2": lambda group: group["eps"][1],
            "d": setting("d"),
            "weight_decay": setting("weight_decay"),
        },
        attributes=_attributes,
        types={"row_var": _rows, "col_var": _columns, "variance": _of_vectors},
    ),
)
