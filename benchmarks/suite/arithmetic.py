"""FLOPs of matrix products, as the records of Onward's ops count them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onward.graph.ops import OPS
from onward.graph.types import DType, Type, value
from suite.products import Product


def op_flops(
    op: str,
    inputs: Sequence[Type | None],
    outputs: Sequence[Type],
    attrs: Mapping[str, Any],
) -> int:
    """FLOPs of one call, two for each multiplication with its addition; 0 for an op without matrix
    products."""
    return value(OPS[op].flops(inputs, outputs, attrs))


def op_bytes(
    op: str,
    inputs: Sequence[Type | None],
    outputs: Sequence[Type],
    attrs: Mapping[str, Any],
) -> int:
    """Bytes that one call reads and writes."""
    return value(OPS[op].moved(inputs, outputs, attrs))


def product_flops(product: Product) -> int:
    """FLOPs of one of the `product.count` equal matrix products."""
    left = Type(DType.FLOAT, (product.batch, product.m, product.k))
    right = Type(DType.FLOAT, (product.batch, product.k, product.n))
    return op_flops("MatMul", [left, right], [left.with_shape((*left.shape[:2], product.n))], {})


def causal_share(tokens: int) -> float:
    """The share of attention scores that a causal mask leaves; an op record counts all of them."""
    return (tokens + 1) / (2 * tokens)
