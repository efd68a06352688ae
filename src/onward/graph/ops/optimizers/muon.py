"""Muon (K. Jordan et al., 2024, kellerjordan.github.io/posts/muon), in torch's form, for matrices.

u <- u + (1 - momentum) (g - u)       x = g + momentum (u - g)  (nesterov), or u
x <- x / max(|x|, eps), then `steps` times   x <- a x + (b x x' + c x x' x x') x
p <- (1 - lr decay) p - lr r x,   r = sqrt(max(1, N/M)), or 0.2 sqrt(max(N, M))  (arXiv 2502.16982)

The iteration replaces x by the nearest matrix with orthogonal rows, roughly. torch computes it in
bf16; here it has the parameter's precision, which is nearer to the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import mixed, one_less, scaled, shrunk
from onward.graph.ops.optimizers.record import Group, Groups, Optimizer, setting, updated_types
from onward.graph.ops.record import Op, Types
from onward.graph.types import Size

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


@dataclass
class Muon:
    """Muon, as `torch.optim.Muon`: every trained parameter has to be a matrix. `MuonWithAdamW`
    trains whole models."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    groups: Groups = ()


def _orthogonal(
    b: Builder, x: Value, eps: Value, coefficients: Sequence[Value], steps: int
) -> Value:
    """Newton and Schulz's iteration on a matrix f[N,M]."""
    dtype, (rows, columns) = type_of(x).dtype, type_of(x).shape
    linear, cubic, quintic = (b.cast(c, dtype) for c in coefficients)
    tall = int(rows) > int(columns)  # type: ignore[arg-type]
    x = b.transpose(x, (1, 0)) if tall else x
    norm = b.ReduceL2(x, keepdims=0)
    x = b.Div(x, b.Max(norm, b.cast(eps, dtype)))
    for _ in range(steps):
        gram = b.MatMul(x, b.transpose(x, (1, 0)))
        inner = b.Add(b.Mul(gram, cubic), b.Mul(b.MatMul(gram, gram), quintic))
        x = b.Add(b.Mul(x, linear), b.MatMul(inner, x))
    return b.transpose(x, (1, 0)) if tall else x


def _ratio(rows: int, columns: int, adjust: str) -> float:
    """The factor of the learning rate for a matrix of this shape, as torch chooses it."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The body of Muon: `p', u'`, both of p's type."""
    given = [x for x in inputs[:11] if x is not None]
    p, g, u, lr, momentum, eps, decay, *coefficients, _ = given
    rows, columns = (int(n) for n in type_of(p).shape)  # type: ignore[arg-type]
    g = scaled(b, g, inputs[11] if len(inputs) > 11 else None)
    u = mixed(b, u, g, one_less(b, momentum))
    x = mixed(b, g, u, momentum) if attrs["nesterov"] else u
    x = _orthogonal(b, x, eps, coefficients, attrs["steps"])
    rate = b.Mul(lr, np.array(_ratio(rows, columns, attrs["adjust"])))
    return [b.Sub(shrunk(b, p, lr, decay), b.Mul(x, b.cast(rate, type_of(p).dtype))), u]


def _flops(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """FLOPs of the products with and between Gram matrices, by the smaller side."""
    assert inputs[0] is not None
    rows, columns = sorted(int(n) for n in inputs[0].shape)  # type: ignore[arg-type]
    return attrs["steps"] * 2 * rows * rows * (2 * columns + rows)


_UPDATE = Op(
    name="MuonUpdate",
    flops=_flops,
    infer=updated_types(slots=1),
    body=_body,
    doc="p', u' of Muon. Inputs: p f[N,M], g f[N,M], u f[N,M], lr, momentum, eps, weight decay, "
    "the polynomial's coefficients a, b, c f64[], step i64[], scale f[]?.",
    cases=tuple(
        (
            {"steps": 2, "nesterov": nesterov, "adjust": adjust},
            (p, p, p, *("f64[]",) * 7, "i64[]", *scale),
        )
        for p, nesterov, adjust in (
            ("f32[4,6]", 1, "original"), ("f32[6,4]", 0, "match_rms_adamw"),
        )
        for scale in ((), ("f32[]",))
    ),
)  # fmt: skip


def _attributes(group: Group) -> dict[str, Any]:
    return {
        "nesterov": int(group["nesterov"]),
        "steps": int(group["ns_steps"]),
        "adjust": group["adjust_lr_fn"] or "original",
    }


def _coefficient(i: int) -> Callable[[Group], float]:
    """A function that reads a coefficient of the polynomial from a group."""
    return lambda group: group["ns_coefficients"][i]


def _epsilon(group: Group) -> float:
    """The norm's lower bound: where `eps` is AdamW's, it is `ns_eps`."""
    return group.get("ns_eps", group["eps"])


MUON = Optimizer(
    description=Muon,
    torch="torch.optim.Muon",
    update=_UPDATE,
    slots=("momentum_buffer",),
    hyperparameters={
        "lr": setting("lr"),
        "momentum": setting("momentum"),
        "eps": _epsilon,
        "weight_decay": setting("weight_decay"),
        "linear": _coefficient(0),
        "cubic": _coefficient(1),
        "quintic": _coefficient(2),
    },
    attributes=_attributes,
    counted=False,
)
OPTIMIZERS = (MUON,)
