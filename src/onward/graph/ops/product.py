"""Matrix products of the ONNX standard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.graph.ops.call import Call
from onward.graph.ops.record import Types, standard
from onward.graph.types import Size, Type, broadcast, product


def _matmul(call: Call) -> Type:
    a, b = call.shape(0), call.shape(1)
    if len(a) < 2 or len(b) < 2:
        raise ValueError("MatMul: vectors are written as matrices first")
    if a[-1] != b[-2]:
        raise ValueError(f"MatMul({call.type(0)}, {call.type(1)}): inner sizes differ")
    return call.type().with_shape((*broadcast(a[:-2], b[:-2]), a[-2], b[-1]))


def _gemm(call: Call) -> Type:
    (m, k), (k2, n) = call.shape(0), call.shape(1)
    if call.attrs.get("transA"):
        m, k = k, m
    if call.attrs.get("transB"):
        k2, n = n, k2
    if k != k2:
        raise ValueError(f"Gemm({call.type(0)}, {call.type(1)}): inner sizes differ")
    return call.type().with_shape((m, n))


def _flops(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """FLOPs of `[*S,M,K] @ [*S,K,N]`, where M and K may be exchanged."""
    a, y = inputs[0], outputs[0]
    assert a is not None and y is not None
    outer = product(y.shape[:-2])
    return outer * product(a.shape[-2:]) * y.shape[-1] * 2


OPS = (*standard(_matmul, "MatMul", flops=_flops), *standard(_gemm, "Gemm", flops=_flops))
