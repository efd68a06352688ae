"""A loss that is a mean over counted labels, written as a sum and a divisor.

    loss = sum / divisor        divisor: the number of labels, or the sum of their weights

Several micro-batches equal one big batch if their sums and their divisors are added, which the mean
of their means is not where they hold different numbers of labels. A loss has this form if it ends
in a mean cross entropy, in a mean over the batch's elements, or in `sum / divisor` where the
divisor is a sum over the batch that no parameter takes part in (a masked mean). Factors that are
constants, and casts, may follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, array_of, content_of, role_of, type_of
from onward.graph.graph import attributes as attributes_of
from onward.graph.ops import OPS
from onward.graph.ops.loss import ignored_label
from onward.graph.ops.reduce import reduced_dims
from onward.graph.types import Dim, DType, Shape, product

# cross entropies, with the places of labels and class weights among their inputs
_CROSS_ENTROPIES = {
    "SoftmaxCrossEntropyLoss": (1, 2),
    "CrossEntropyLoss": (1, 2),
    "LinearCrossEntropy": (3, 4),
}
_SAME = ("Cast", "Reshape", "Squeeze", "Unsqueeze", "Identity")  # of one element
_FACTORS = ("Mul", "Div")
_BOUNDS = ("Max", "Where", "Add")  # of a divisor, so that it is not 0
_PLACED = ("Gather", "Slice", "Expand", "Concat", "Cast", "Where", "Range", "Shape", "Pad")


@dataclass(frozen=True)
class _Mean:
    """The mean that a loss ends in. node: computes the mean. sum: the node that adds up; the same
    one where one op does both (a cross entropy, ReduceMean). bounded: the divisor f[] with its
    lower bound, where the loss divides explicitly; else None."""

    node: Node
    sum: Node
    bounded: Value | None = None


def obstacle(graph: Graph) -> str | None:
    """The reason why the loss of a forward graph has no sum and divisor; None where it has."""
    found = _find(graph, samples_of(graph))
    return found if isinstance(found, str) else None


def summed(graph: Graph) -> Graph:
    """Returns a copy of a forward graph whose loss is the sum; the divisor is an output more
    (`Signature.divisor`). Raises OnwardError where the loss has none."""
    graph = graph.clone()
    found = _find(graph, None)
    if isinstance(found, str):
        raise OnwardError(
            f"the loss cannot be averaged over a window's labels: {found}; fix: write it as "
            "(losses * mask).sum() / mask.sum()"
        )
    node = found.node
    b = Builder.at(graph, node)
    if found.bounded is not None:
        assert node.inputs[0] is not None
        total, divisor = node.inputs[0], found.bounded
        total = b.reshape(total, type_of(node.outputs[0]).shape)
    elif node.op_type in _CROSS_ENTROPIES:
        made = b.node(node.op_type, node.inputs, {**attributes_of(node), "reduction": "sum"})
        outputs = made if isinstance(made, tuple) else (made,)
        for old, new in zip(node.outputs[1:], outputs[1:], strict=False):
            graph.replace(old, new)
        total, divisor = outputs[0], _label_count(b, node)
    else:
        x = node.inputs[0]
        dims = _dims(node)
        total = b.one("ReduceSum", node.inputs, attributes_of(node))
        sizes = [type_of(x).shape[d] for d in dims]
        divisor = b.squeeze(b.size(product(sizes)), [0])
    divisor = b.cast(b.reshape(divisor, ()), DType.DOUBLE)
    graph.replace(node.outputs[0], total)
    graph.remove([node])
    name = graph.output("divisor", divisor)
    graph.signature = graph.signature.but(divisor=name)
    return graph


def counted_cross_entropy(graph: Graph) -> tuple[Node, Value] | str:
    """The cross entropy over whose labels the loss of a forward graph is the mean, and these
    labels; or the reason why there is none."""
    found = _find(graph, samples_of(graph))
    if isinstance(found, str):
        return found
    if found.node.op_type not in _CROSS_ENTROPIES:
        return "the loss is no mean of a cross entropy"
    labels = found.node.inputs[_CROSS_ENTROPIES[found.node.op_type][0]]
    assert labels is not None, "a cross entropy has labels"
    return found.node, labels


def averaged(graph: Graph) -> list[Value]:
    """The values whose elements the loss of a forward graph is the mean of: losses, or what a cross
    entropy reads; none where the loss is no mean."""
    found = _find(graph, samples_of(graph))
    if isinstance(found, str):
        return []
    node = found.sum
    if node.op_type in _CROSS_ENTROPIES:
        return [x for x in node.inputs if x is not None]
    values = [_deepest(node) if node.op_type == "ReduceSum" else node.inputs[0]]
    return [x for x in values if x is not None]


def unbounded(divisor: Value) -> Value:
    """The part of a divisor that is added up over micro-batches: without its lower bound."""
    return _taken_apart(divisor)[0]


def bounded(b: Builder, divisor: Value, total: Value) -> Value:
    """Applies the bounds of a divisor to the total f64[] of several."""
    for op_type, bound in reversed(_taken_apart(divisor)[1]):
        total = b.Add(total, bound) if op_type == "Add" else b.Max(total, bound)
    return total


def divisor_of_all(b: Builder, divisors: Sequence[Value]) -> Value:
    """The divisor f64[] of all micro-batches of a graph, from that of each, f64[]."""
    total = unbounded(divisors[0])
    for divisor in divisors[1:]:
        total = b.Add(b.cast(total, DType.DOUBLE), b.cast(unbounded(divisor), DType.DOUBLE))
    return bounded(b, divisors[0], b.cast(total, DType.DOUBLE))


def _taken_apart(divisor: Value) -> tuple[Value, list[tuple[str, float]]]:
    """A divisor without its bounds, and these from the outside in: op and constant."""
    bounds: list[tuple[str, float]] = []
    while (node := divisor.producer()) is not None:
        if node.op_type in _SAME:
            inner = node.inputs[0]
        elif node.op_type in _BOUNDS:
            inner, bound = _bounded_by(node)
            bounds += [] if inner is None else [(node.op_type, bound)]
        else:
            break
        if inner is None:
            break
        divisor = inner
    return divisor, bounds


def _bounded_by(node: Node) -> tuple[Value | None, float]:
    """The value that a node bounds from below by a constant, or adds one to, and the constant; None
    where it does another thing."""
    values = [x for x in node.inputs if x is not None]
    if node.op_type == "Where":  # torch's clamp: Where(x < least, least, x)
        test, values = values[0].producer(), values[1:]
        if test is None or test.op_type != "Less" or list(test.inputs) != values[::-1]:
            return None, 0.0
    constants = [_constant(x) for x in values]
    found = [(x, c) for x, c in zip(reversed(values), constants, strict=True) if c is not None]
    return found[0] if len(values) == 2 and len(found) == 1 else (None, 0.0)


# ---- recognising


def _find(graph: Graph, samples: str | None) -> _Mean | str:
    """The mean that a loss ends in, or the reason why there is none. samples: the symbol of the
    number of samples, over which the mean must be; None: not asked."""
    value = graph.outputs[graph.signature.differentiated_outputs[0]]
    outputs, first, is_one_row = graph.output_values(), True, samples_of(graph) == "1"
    while True:
        node = value.producer()
        if node is None:
            return "the loss is an input of the graph"
        if not first and (len(list(value.uses())) != 1 or value in outputs):
            return f"the result of its {node.op_type} is read twice"
        if first and list(value.uses()):
            return "other ops read the loss"
        first = False
        found = _mean(node, samples, is_one_row)
        if found is not None:
            return found
        following = _link(node)
        if following is None:
            return f"it ends in {node.op_type}, not in a mean over labels"
        value = following


def _link(node: Node) -> Value | None:
    """The input x of a node that computes c * x, for a constant c and one element x; else None."""
    x = node.inputs[0]
    if x is None or not _single(type_of(x).shape) or not _single(type_of(node.outputs[0]).shape):
        return None
    if node.op_type in (*_SAME, "Neg", "ReduceMean", "ReduceSum"):
        return x
    if node.op_type in _FACTORS:
        if _constant(node.inputs[1]) is not None:
            return x
        if node.op_type == "Mul" and _constant(x) is not None:
            return node.inputs[1]
    return None


def _mean(node: Node, samples: str | None, is_one_row: bool) -> _Mean | str | None:
    """The mean that a node computes, the reason why it is of no use, or None: it may be further
    up. is_one_row: whether the graph is for batches of one row."""
    x = node.inputs[0]
    if x is None:
        return None
    attributes, shape = attributes_of(node), type_of(x).shape
    if node.op_type in _CROSS_ENTROPIES:
        if attributes.get("reduction", "mean") != "mean":
            return "it is a sum, not a mean, of the cross entropies"
        return _Mean(node, node)
    if node.op_type == "ReduceMean" and (not _single(shape) or (is_one_row and _of_rows(node))):
        dims = _dims(node)
        if not all(size == 1 or i in dims for i, size in enumerate(shape)):
            return "its mean keeps more than one element"
        return _Mean(node, node) if _linear(shape, samples) else "its mean is not over the samples"
    if node.op_type == "ReduceSum" and not _single(shape):
        return "it is a sum, not a mean"
    if node.op_type == "Div" and _constant(node.inputs[1]) is None:
        divisor = node.inputs[1]
        if divisor is None or not _single(type_of(divisor).shape):
            return None
        adding = _sum_of(x, samples, is_one_row)
        if adding is None:
            return "what it divides is no sum over the samples"
        reason = _uncounted(divisor, samples)
        return reason if reason is not None else _Mean(node, adding, divisor)
    return None


def _of_rows(node: Node) -> bool:
    """Whether a reduction of one element, in a graph for one row, is over the rows: along dim 0,
    and its input has not been a scalar before."""
    value = node.inputs[0]
    if 0 not in _dims(node):
        return False
    while value is not None:
        if not type_of(value).shape:
            return False
        producer = value.producer()
        value = None if producer is None else _link(producer)
    return True


def _sum_of(value: Value, samples: str | None, is_one_row: bool) -> Node | None:
    """The node that adds up over the samples, where the value is a constant multiple of its result;
    None for other values."""
    node = value.producer()
    while node is not None:
        x = node.inputs[0]
        if node.op_type in _CROSS_ENTROPIES:
            return node if attributes_of(node).get("reduction", "mean") == "sum" else None
        is_sum = node.op_type == "ReduceSum" and x is not None
        if is_sum and (not _single(type_of(x).shape) or (is_one_row and _of_rows(node))):
            return node if _linear(type_of(_deepest(node)).shape, samples) else None
        following = _link(node)
        if following is None:
            return None
        node = following.producer()
    return None


def _uncounted(divisor: Value, samples: str | None) -> str | None:
    """The reason why a divisor does not add up over micro-batches; None where it does."""
    value = unbounded(divisor)
    content = content_of(value)
    if content is not None and len(content) == 1 and array_of(value) is None:
        return None if _linear(content, samples) else "its divisor is not a number of samples"
    node = value.producer()
    if node is None and array_of(value) is not None and value is not divisor:
        return None if type_of(value).dtype is DType.INT64 else "it is divided by a constant"
    if node is None:
        return f"it is divided by the input {value.name}"
    if node.op_type != "ReduceSum" or not _single(type_of(node.outputs[0]).shape):
        return f"its divisor ends in {node.op_type}, not in a sum over the batch"
    counted = _deepest(node)
    if samples is None:
        return None
    if not _linear(type_of(counted).shape, samples):
        return "its divisor is not a sum over the samples"
    strange = next((found for found in ancestors([counted]) if not _fits(found)), None)
    if strange is None:
        return None
    return f"its divisor depends on {_named(strange)}"


def _fits(found: Node | Value) -> bool:
    """Whether a divisor may depend on this: on the batch and constants, element by element."""
    if isinstance(found, Value):
        return role_of(found) in (Role.BATCH, Role.BUFFER)
    op = OPS[found.op_type]
    return op.elementwise or op.view or op.reshapes or found.op_type in _PLACED


def _named(found: Node | Value) -> str:
    return f"the input {found.name}" if isinstance(found, Value) else f"a {found.op_type}"


def ancestors(values: Iterable[Value]) -> Iterable[Node | Value]:
    """The nodes that values depend on, and the inputs of the graph."""
    stack, seen = list(values), set(values)
    while stack:
        value = stack.pop()
        node = value.producer()
        if node is None:
            if array_of(value) is None:
                yield value
            continue
        yield node
        for x in node.inputs:
            if x is not None and x not in seen:
                seen.add(x)
                stack.append(x)


def _deepest(node: Node) -> Value:
    """What a ReduceSum and those right before it sum, in all."""
    value = node.outputs[0]
    found: Node | None = node
    while found is not None and found.op_type in ("ReduceSum", *_SAME):
        assert found.inputs[0] is not None
        value = found.inputs[0]
        found = value.producer()
    return value


def samples_of(graph: Graph) -> str:
    """The symbol of the number of samples: dim 0 of the first tensor of the batch."""
    for value in graph.inputs_with(Role.BATCH):
        shape = type_of(value).shape
        if shape:
            return str(shape[0])
    return ""


def _linear(shape: Sequence[Dim | int], samples: str | None) -> bool:
    """Whether the number of elements of a shape is proportional to the number of samples. It is
    taken to be in a graph for one number of samples, such as 1, which shows none of it."""
    if samples is None or samples.isdigit():
        return True
    size = product(shape)
    return isinstance(size, Dim) and all(list(n).count(samples) == 1 for n, _ in size.terms)


def _dims(node: Node) -> list[int]:
    """The dims that a reduction works along."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    return reduced_dims(axes, attributes_of(node), type_of(node.inputs[0]).rank)


def _single(shape: Shape) -> bool:
    return all(size == 1 for size in shape)


def _constant(value: Value | None) -> float | None:
    """The number that a constant of one element holds."""
    array: np.ndarray | None = array_of(value)
    if array is None or math.prod(array.shape) != 1:
        return None
    return float(array.reshape(()))


# ---- counting


def _label_count(b: Builder, node: Node) -> Value:
    """The number of labels that a mean cross entropy counts, or the sum of their class weights."""
    label_at, weight_at = _CROSS_ENTROPIES[node.op_type]
    labels = node.inputs[label_at]
    weight = node.inputs[weight_at] if len(node.inputs) > weight_at else None
    assert labels is not None
    kind, rank = type_of(labels).dtype, type_of(labels).rank
    ignored = b.scalar(ignored_label(attributes_of(node)), kind)
    counted = b.Not(b.Equal(labels, ignored))
    shares = b.cast(counted, DType.INT64)
    if weight is not None:
        label = b.Where(counted, labels, b.scalar(0, kind))
        taken = b.Gather(weight, label, axis=0)
        shares = b.Where(counted, taken, b.scalar(0.0, type_of(weight).dtype))
    return b.reduce_sum(shares, range(rank), keepdims=False)


__all__ = [
    "ancestors", "averaged", "bounded", "divisor_of_all", "obstacle", "samples_of", "summed",
    "unbounded",
]  # fmt: skip
