"""`(x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias  =>  LayerNormalization(x, scale, bias)`.

Exporters write it out: those of torch before opset 17 as above, TensorFlow's and JAX's as
`x a + (bias - mean(x) a)` with `a = scale / sqrt(var(x) + epsilon)`. Means are a ReduceMean, or a
ReduceSum over the count.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, type_of
from onward.graph.ops import named
from onward.graph.types import Type, product
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.matching import made_by, number_of, other_input, over_the_last, squared

RESHAPES = named("reshapes")


def layer_norm(graph: Graph) -> int:
    """Fuses every norm over the last dim; returns how many."""
    edits = 0
    for root in list(graph):
        found = _deviation(root) if root.op_type == "Sqrt" else None
        if found is None:
            continue
        x, epsilon = found
        for norm in _norms(root, x):
            last, *weights = _with_weights(graph, norm)
            b = Builder.at(graph, last)
            kind = Type(type_of(x).dtype, type_of(x).shape[-1:])
            scale, bias = (None if w is None else b.reshape(w, kind.shape) for w in weights)
            scale = _ones(b, kind) if scale is None else scale
            made = b.LayerNormalization(x, scale, bias, axis=-1, epsilon=epsilon)[0]
            graph.replace(last.outputs[0], made)
            edits += 1
    if edits:
        dead_code_elimination(graph)  # what is left would count as a reader
    return edits


def _ones(b: Builder, kind: Type) -> Value:
    [size] = kind.shape
    if isinstance(size, int):
        return b.const(np.ones(size, kind.dtype.numpy()))
    return b.full(1.0, kind)


# ---- what is normalized


def _deviation(root: Node) -> tuple[Value, float] | None:
    """The pair (x, epsilon) of a node that computes `sqrt(var(x) + epsilon)`; None for others."""
    total = made_by(root.inputs[0], "Add")
    for variance, epsilon in (total.inputs, total.inputs[::-1]) if total is not None else ():
        number = number_of(epsilon)
        apart = None if number is None else squared(_mean_of(variance))
        node = made_by(apart, "Sub")
        x = None if node is None else node.inputs[0]
        if x is None or node is None or number is None or not 0.0 <= number < math.inf:
            continue
        if _per_row(variance, x) and _is_apart(apart, x):
            return x, number
    return None


def _mean_of(value: Value | None) -> Value | None:
    """The values whose mean over their last dim a value is, whatever its own dims are."""
    node = _maker(value)
    if node is None:
        return None
    if node.op_type == "ReduceMean" and over_the_last(node):
        return node.inputs[0]
    if node.op_type != "Div":
        return None
    total, count = _maker(node.inputs[0]), number_of(node.inputs[1])
    if total is None or total.op_type != "ReduceSum" or not over_the_last(total):
        return None
    return total.inputs[0] if type_of(total.inputs[0]).shape[-1] == count else None


def _maker(value: Value | None) -> Node | None:
    """The node that computes the numbers of a value, in other dims or the same."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in (*RESHAPES, "Expand"):
        x = node.inputs[0]
        if x is None or product(type_of(x).shape) != product(type_of(node.outputs[0]).shape):
            return None
        node = x.producer()
    return node


def _per_row(value: Value | None, x: Value) -> bool:
    """Whether a value is one number for each row of x, which broadcasts over it."""
    return value is not None and type_of(value).shape == (*type_of(x).shape[:-1], 1)


# ---- where it is normalized


class _Norm(NamedTuple):
    """A node that computes `(x - mean(x)) / root`, times scale and plus bias unless these are
    None."""

    node: Node
    scale: Value | None = None
    bias: Value | None = None


def _norms(root: Node, x: Value) -> list[_Norm]:
    """The norms that a root is made for."""
    y = root.outputs[0]
    found = [
        _Norm(node)
        for node in y.consumers()
        if node.op_type == "Div" and node.inputs[1] is y and _is_apart(node.inputs[0], x)
    ]
    for factor, scale in _factors(root, x):
        products = [n for n in factor.consumers() if n.op_type == "Mul"]
        others = [other_input(node, factor) for node in products]
        found += [
            _Norm(node, scale)
            for node, other in zip(products, others, strict=True)
            if _is_apart(other, x)
        ]
        scaled = [n.outputs[0] for n, other in zip(products, others, strict=True) if other is x]
        for node, other in zip(products, others, strict=True):
            if (sign := _sign_of_mean(other, x)) and scaled:
                found += _from_products(scaled[0], node.outputs[0], sign, x, scale)
    return found


def _factors(root: Node, x: Value) -> list[tuple[Value, Value | None]]:
    """The values `1 / root` and `scale / root`, each with its scale."""
    found: list[tuple[Value, Value | None]] = []
    for node in root.outputs[0].consumers():
        over = node.op_type == "Div" and node.inputs[1] is root.outputs[0]
        if node.op_type != "Reciprocal" and not (over and number_of(node.inputs[0]) == 1.0):
            continue
        factor = node.outputs[0]
        found.append((factor, None))
        for scaled in factor.consumers():
            scale = _weight(scaled, factor, x) if scaled.op_type == "Mul" else None
            if scale is not None:
                found.append((scaled.outputs[0], scale))
    return found


def _is_apart(value: Value | None, x: Value) -> bool:
    """Whether a value is `x - mean(x)`."""
    node = made_by(value, "Sub")
    return node is not None and node.inputs[0] is x and _sign_of_mean(node.inputs[1], x) == 1


def _sign_of_mean(value: Value | None, x: Value) -> int:
    """1 for `mean(x)`, -1 for `-mean(x)`, 0 for others."""
    negated = made_by(value, "Neg")
    inner = value if negated is None else negated.inputs[0]
    if not _per_row(inner, x) or _mean_of(inner) is not x:
        return 0
    return 1 if negated is None else -1


def _from_products(
    scaled: Value, mean: Value, sign: int, x: Value, scale: Value | None
) -> list[_Norm]:
    """The norms that take a product of the mean from the product of x. scaled: `x a`. mean:
    `mean(x) a`, times sign."""
    found: list[_Norm] = []
    for node in mean.consumers():
        minuend = other_input(node, mean)
        takes = node.op_type == ("Sub" if sign == 1 else "Add") and node.inputs[0] is not (
            mean if sign == 1 else None
        )
        if not takes or minuend is None:
            continue
        if minuend is scaled:
            found.append(_Norm(node, scale))
        elif _is_weight(minuend, x):  # x a + (bias - mean a)
            found += [
                _Norm(last, scale, _flat(minuend))
                for last in node.outputs[0].consumers()
                if last.op_type == "Add" and other_input(last, node.outputs[0]) is scaled
            ]
    return found


# ---- its weights


def _with_weights(graph: Graph, norm: _Norm) -> _Norm:
    """The norm with the scale and the bias that it is multiplied by and added to next, where
    nothing else reads it."""
    node, scale, bias = norm
    x = node.outputs[0]
    for op_type in ("Mul", "Add"):
        readers = list(node.outputs[0].consumers())
        alone = len(readers) == 1 and node.outputs[0] not in graph.output_values()
        if bias is not None or not alone or readers[0].op_type != op_type:
            continue
        weight = _weight(readers[0], node.outputs[0], x)
        if weight is None:
            continue
        if op_type == "Add":
            node, bias = readers[0], weight
        elif scale is None:
            node, scale = readers[0], weight
    return _Norm(node, scale, bias)


def _weight(node: Node, y: Value, x: Value) -> Value | None:
    """The other input of a node, if it is one number per feature."""
    other = other_input(node, y)
    return _flat(other) if other is not None and _is_weight(other, x) else None


def _is_weight(value: Value, x: Value) -> bool:
    have, of = type_of(value), type_of(x)
    *ones, last = have.shape or (0,)
    fits = last == of.shape[-1] and all(n == 1 for n in ones) and have.rank <= of.rank
    return fits and have.dtype == of.dtype


def _flat(value: Value) -> Value:
    """The value that a weight was reshaped from."""
    node = value.producer()
    if node is not None and node.op_type in RESHAPES and node.inputs[0] is not None:
        inner = node.inputs[0]
        if type_of(inner).shape == type_of(value).shape[-1:]:
            return inner
    return value


__all__ = ["layer_norm"]
