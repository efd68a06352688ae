"""Fuses attention that a model writes out, `dropout(softmax(scores)) v`, into one Attention node.

The scores are `scale q k^T`, with factors and divisors in any order, optionally under a soft cap
`c tanh(scores / c)`, added masks and biases, and `where(mask, scores, number)`. Products of rank 3
(`bmm`, `baddbmm`) have samples and heads merged in one dim. If fusion fails, the reason is stored
in the softmax's `meta["unfused"]`, for the pass that makes flash attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, array_of, attributes, precision_said, type_of
from onward.graph.ops.attention import LOWEST, as_bias
from onward.graph.types import DType, Shape, product
from onward.rewrite.matching import alike

HIDDEN = -1e9  # a score of no key, where masks fill with that number or a lower one


@dataclass(frozen=True)
class _Addend:
    """A mask or bias times a number. leading: the dims that its merged first dim stands for, or
    None."""

    value: Value
    factor: float
    leading: Shape | None


@dataclass
class _Scores:
    """The scores `softcap tanh(scale q k^T / softcap)` (no cap: 0) with masks and biases, as a walk
    from the softmax back to the product has found them so far."""

    factor: float = 1.0  # of the nodes below, or of tanh's argument
    softcap: float = 0.0
    added: list[_Addend] = field(default_factory=list)
    # (mask, negated, number) of each Where
    filled: list[tuple[Value, bool, float]] = field(default_factory=list)
    # whether the number that fills is added, so that hidden scores have a gradient
    fill_is_added: bool = False
    # (mask, hides, number, as an addend) of each Where of 0 and about the lowest number
    lowest: list[tuple[Value, bool, float, _Addend]] = field(default_factory=list)
    shape: Shape | None = None  # the shape after a Reshape, if one was met
    matmul: Node | None = None  # where the walk ended
    is_turned: bool = False  # the product is k q^T, and was transposed

    @property
    def scale(self) -> float:
        return self.factor * (self.softcap or 1.0)

    def settle(self) -> None:
        """Takes a lowest number that is added alone for one that fills, whose sum with a score is
        that number. Two of them, or one beside a bias, are added: their sum may be minus
        infinity."""
        alone = len(self.lowest) == 1 and not self.added
        for condition, hides, number, addend in self.lowest:
            fill = number * addend.factor
            if alone and -math.inf < fill <= LOWEST:
                self.filled.append((condition, hides, fill))
                self.fill_is_added = True
            else:
                self.added.append(addend)
        self.lowest.clear()


def fuse_attention(graph: Graph) -> int:
    """Fuses every attention; returns how many."""
    outputs, found = set(graph.outputs.values()), 0
    for node in list(graph):
        if node.op_type != "Softmax":
            continue
        made = _fused(graph, node, outputs)
        if made is None:
            found += 1
        elif made:
            node.meta["unfused"] = made
    return found


def _fused(graph: Graph, softmax: Node, outputs: set[Value]) -> str | None:
    """Fuses the attention around a softmax; returns None if it did. Otherwise returns the reason,
    "" where nothing looks like attention."""
    x, probabilities = softmax.inputs[0], softmax.outputs[0]
    assert x is not None
    rank = type_of(x).rank
    if attributes(softmax).get("axis", -1) % rank != rank - 1 or rank not in (3, 4):
        return ""
    scores = _scores(x)
    filled, hidden = _without_nan(probabilities), _without_hidden(probabilities, scores)
    filled = filled or hidden
    clean = probabilities if filled is None else filled.outputs[0]
    dropout = _reader(clean, "Dropout")
    dropped = clean if dropout is None else dropout.outputs[0]
    last, reshape = _reader(dropped, "MatMul"), None
    if last is None and (reshape := _reader(dropped, "Reshape")) is not None:
        last = _reader(reshape.outputs[0], "MatMul")
    if last is None or scores is None or isinstance(scores, str):
        return scores if last is not None and isinstance(scores, str) else ""
    if filled is not None and (scores.added or not scores.filled):
        return "rows without a key are zeros, and its mask is added"
    chain = [n for n in (softmax, filled, dropout, reshape) if n is not None]
    for node, reader in zip(chain, [*chain[1:], last], strict=True):
        others = [
            n for n in node.outputs[0].consumers() if n is not reader and n.op_type != "IsNaN"
        ]
        if others:
            return f"its probabilities are read by {others[0].op_type} too"
    if filled is not None and filled is hidden:  # a row without a key is zeros
        assert isinstance(scores, _Scores)
        scores.filled = [(where, hides, -math.inf) for where, hides, _ in scores.filled]
    made = _attention(graph, x, scores, dropout, reshape, last)
    if isinstance(made, str):
        return made
    graph.replace(last.outputs[0], made)
    _remove_unread(graph, last, outputs)
    return None


def _reader(value: Value, op_type: str) -> Node | None:
    """The first node of this type that reads the value as its first input."""
    found = (n for n in value.consumers() if n.op_type == op_type and n.inputs[0] is value)
    return next(found, None)


def _without_nan(probabilities: Value) -> Node | None:
    """The node `Where(IsNaN(p), 0, p)`, by which a row without a key is zeros, as PyTorch's
    `scaled_dot_product_attention` has it; None where there is none."""
    readers = list(probabilities.consumers())
    for node in readers:
        if node.op_type != "Where" or node.inputs[2] is not probabilities:
            continue
        asked = node.inputs[0].producer() if node.inputs[0] is not None else None
        is_nan = asked is not None and asked.op_type == "IsNaN" and asked in readers
        if is_nan and _number(_unexpanded(node.inputs[1])) == 0.0:
            return node
    return None


def _without_hidden(probabilities: Value, scores: _Scores | str | None) -> Node | None:
    """The node `Where(mask, p, 0)` behind a softmax of scores that the same mask has filled, by
    which a row without a key is zeros, as Keras has it; None where there is none."""
    if not isinstance(scores, _Scores) or len(scores.filled) != 1:
        return None
    [(mask, hides, number)] = scores.filled
    if number > HIDDEN:
        return None
    for node in probabilities.consumers():
        if node.op_type != "Where":
            continue
        condition, shown, hidden = node.inputs
        kept, other = (hidden, shown) if hides else (shown, hidden)
        if kept is probabilities and alike(condition, mask) and _number(_unexpanded(other)) == 0.0:
            return node
    return None


def _attention(
    graph: Graph, x: Value, scores: _Scores, dropout: Node | None, reshape: Node | None, last: Node
) -> Value | str:
    """Writes the Attention node; returns its result in the shape of `last`'s, or a reason why
    not."""
    assert scores.matmul is not None
    b = Builder.at(graph, last)
    q, turned = (_unscaled(b, x, scores) for x in scores.matmul.inputs)
    v, y = last.inputs[1], type_of(last.outputs[0]).shape
    assert q is not None and turned is not None and v is not None
    shape = type_of(x).shape
    ranks = {type_of(value).rank for value in (q, turned)}
    if len(ranks) != 1 or type_of(v).rank != len(y) or min(*ranks, len(y)) < 3:
        return "its products broadcast over samples or heads"
    if reshape is not None and not _joins(shape, type_of(reshape.outputs[0]).shape):
        return "its probabilities are reshaped"
    if scores.is_turned:
        q, turned = _transposed(b, turned), _transposed(b, q)
    # an autocast block asks for fp32 in one of the products
    if precision_said(scores.matmul) == DType.FLOAT.name:
        b.precision = DType.FLOAT.name
    leading = shape[:-2]
    q = _led(b, q, leading) if _has_heads(q, leading) else None
    turned, v = (_led(b, value, leading) for value in (turned, v))
    if q is None or turned is None or v is None:
        return "its products broadcast over samples or heads"
    masks = _masks(b, scores, shape)
    if isinstance(masks, str):
        return masks
    mask, bias = masks
    k = _transposed(b, turned)
    if len(shape) == 3:
        q, k, v = (b.unsqueeze(value, [1]) for value in (q, k, v))
    attrs = {"scale": scores.scale, "is_causal": 0}
    if scores.softcap:
        attrs["softcap"] = scores.softcap
    if scores.filled and math.isfinite(fill := scores.filled[0][2]):
        attrs["fill"] = fill
        if scores.fill_is_added:
            attrs["fill_is_added"] = 1
    draw: list[Value | None] = []
    if dropout is not None:
        given = attributes(dropout)
        attrs |= given
        at = given.get("sample_dim", -1)
        if len(shape) == 3 and at > 0:
            attrs["sample_dim"] = at + 1
        draw = list(dropout.inputs[1:])
    inputs = [q, k, v, *([mask] if mask is not None or draw else []), *draw]
    if bias is not None:
        inputs += [*[None] * (8 - len(inputs)), as_bias(b, bias, q, k)]
    made: Value = b.Attention(*inputs, **attrs)
    return b.reshape(made, y) if type_of(made).shape != y else made


def _joins(whole: Shape, flat: Shape) -> bool:
    """Whether `flat` is `[B*H,T,S]` for the whole `[B,H,T,S]`."""
    return len(flat) > 2 and flat[-2:] == whole[-2:] and product(flat[:-2]) == product(whole[:-2])


def _led(b: Builder, value: Value, leading: Shape) -> Value | None:
    """Reshapes the value to have the dims `leading` before its last two; None where it broadcasts
    over samples."""
    shape = type_of(value).shape
    own = shape[:-2]
    if own == leading:
        return value
    if len(own) == len(leading) == 2 and own[0] == leading[0] and own[1] == 1:
        return value  # keys or values that all heads share
    if product(own) == product(leading):
        return b.reshape(value, (*leading, *shape[-2:]))
    return None


def _has_heads(q: Value, leading: Shape) -> bool:
    """Whether queries have a head for each of the scores: one head that those of several keys share
    is no grouping that attention knows."""
    own = type_of(q).shape[:-2]
    return own == leading or product(own) == product(leading)


def _swap(rank: int) -> list[int]:
    """The `perm` that transposes the last two dims."""
    return [*range(rank - 2), rank - 1, rank - 2]


def _transposed(b: Builder, turned: Value) -> Value:
    """Returns `k` for `k^T`."""
    swap, node = _swap(type_of(turned).rank), turned.producer()
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        perm = attributes(node).get("perm")
        if perm is not None:
            return b.transpose(node.inputs[0], [perm[d] for d in swap])
    return b.transpose(turned, swap)


def _masks(b: Builder, scores: _Scores, shape: Shape) -> tuple[Value | None, Value | None] | str:
    """Merges everything filled or added into a mask, boolean or float, and a bias if there is a
    boolean mask besides. Returns a reason where that is impossible."""
    low = {number for _, _, number in scores.filled}
    if len(low) > 1:
        return "its masks fill scores with different numbers"
    allowed: Value | None = None
    for expanded, hides, _ in scores.filled:
        where = _narrow(expanded)  # masks broadcast
        inner = where.producer()
        if hides and inner is not None and inner.op_type == "Not" and inner.inputs[0] is not None:
            visible = _narrow(inner.inputs[0])
        else:
            visible = b.Not(where) if hides else where
        allowed = visible if allowed is None else b.And(allowed, visible)
    added: Value | None = None
    for addend in scores.added:
        value = addend.value
        if addend.leading is not None:
            value = b.reshape(value, (*addend.leading, *type_of(value).shape[-2:]))
        value = value if addend.factor == 1.0 else b.Mul(value, addend.factor)
        added = value if added is None else b.Add(added, value)
    if len(shape) == 3:
        allowed, added = (
            b.unsqueeze(x, [1]) if x is not None and type_of(x).rank == 3 else x
            for x in (allowed, added)
        )
    if allowed is None or added is None:
        return (added if allowed is None else allowed), None
    return allowed, added


# ---- the way from the softmax to the product


def _scores(x: Value) -> _Scores | str | None:
    """Walks from the softmax to the product. Returns None where there is none, and a reason where
    it is found behind something unsupported."""
    walk, value = _Scores(), x
    while (node := value.producer()) is not None:
        if len({n for n in value.consumers() if n.op_type != "Shape"}) > 1:
            return "its scores are also read elsewhere, and would be computed twice"
        product = node if node.op_type == "MatMul" else _turned_product(node)
        if product is not None:
            walk.matmul, walk.is_turned = product, product is not node
            if walk.lowest and walk.filled:  # a row may be hidden by both, and sees where one ends
                return "a mask fills its scores, and a lowest number is added to them"
            walk.settle()
            return walk
        below = _below(node, walk)
        if below is None or isinstance(below, str):
            return below
        value = below
    return None


def _turned_product(node: Node) -> Node | None:
    """The product whose last two dims a node transposes; None where there is none."""
    inner = None if node.inputs[0] is None else node.inputs[0].producer()
    if node.op_type != "Transpose" or inner is None or inner.op_type != "MatMul":
        return None
    swap = _swap(type_of(node.outputs[0]).rank)
    alone = len(inner.outputs[0].uses()) == 1
    return inner if alone and list(attributes(node).get("perm", ())) == swap else None


def _below(node: Node, walk: _Scores) -> Value | str | None:
    """The scores that a node reads; records what the node does to them."""
    match node.op_type:
        case "Mul" | "Div":
            for i, j in ((0, 1), (1, 0)) if node.op_type == "Mul" else ((0, 1),):
                number = _number(node.inputs[j])
                if number is not None and 0.0 < number < math.inf:
                    walk.factor *= number if node.op_type == "Mul" else 1.0 / number
                    return node.inputs[i]
            return None
        case "Tanh":
            if walk.softcap:
                return "its scores are capped twice"
            walk.softcap, walk.factor = walk.factor, 1.0
            return node.inputs[0]
        case "Where":
            return _filled(node, walk)
        case "Add" | "Sub":
            return _added(node, walk)
        case "Reshape":
            assert node.inputs[0] is not None
            inner = type_of(node.inputs[0]).shape
            if walk.shape is not None or not _joins(type_of(node.outputs[0]).shape, inner):
                return None
            walk.shape = type_of(node.outputs[0]).shape
            return node.inputs[0]
        case _:
            return None


def _filled(node: Node, walk: _Scores) -> Value | str | None:
    condition, *sides = node.inputs
    y = type_of(node.outputs[0]).shape
    assert condition is not None
    for i, side in enumerate(sides):
        number = _number(_unexpanded(side))
        other = sides[1 - i]
        if number is None or other is None or type_of(other).shape != y:
            continue
        if walk.softcap or walk.shape is not None:
            return "its mask is added before its soft cap, or before a reshape"
        if walk.added and number != -math.inf:
            return (
                "something is added to the scores after the mask has filled them; fix: "
                "fill with -inf"
            )
        if math.isnan(number) or number == math.inf:
            return None
        number *= walk.factor
        least = float(np.finfo(type_of(other).dtype.numpy()).min)
        walk.filled.append((condition, i == 0, number if number >= least else -math.inf))
        return other
    return None


def _added(node: Node, walk: _Scores) -> Value | str | None:
    """The side of a sum that leads to the product; the other is recorded as a mask or bias."""
    if walk.softcap:
        return "a bias is added before its soft cap"
    y, is_sum = type_of(node.outputs[0]).shape, node.op_type == "Add"
    reason: str | None = None
    if is_sum and walk.shape is None:
        for scores, other in (node.inputs, node.inputs[::-1]):
            hidden = _hidden(other)
            if hidden is None or scores is None or type_of(scores).shape != y:
                continue
            if isinstance(_scores(scores), _Scores):
                condition, hides, number = hidden
                assert other is not None
                if number == -math.inf:
                    walk.filled.append((condition, hides, number))
                else:
                    walk.lowest.append(
                        (condition, hides, number, _Addend(other, walk.factor, None))
                    )
                return scores
    for scores, other in (node.inputs, node.inputs[::-1]) if is_sum else (node.inputs,):
        if scores is None or other is None or type_of(scores).shape != y:
            continue
        found = _scores(scores)
        if not isinstance(found, _Scores):
            reason = reason or found
            continue
        leading = None
        if walk.shape is not None and 2 < type_of(other).rank < len(y):
            return "a bias is added before a reshape"
        if walk.shape is not None and type_of(other).rank == len(y):
            if type_of(other).shape[:-2] != y[:-2]:
                return "a bias is added before a reshape"
            leading = walk.shape[:-2]
        walk.added.append(_Addend(other, walk.factor if is_sum else -walk.factor, leading))
        return scores
    return reason


def _hidden(value: Value | None) -> tuple[Value, bool, float] | None:
    """For a mask `where(condition, 0, number)` to be added, with a number beside which a score is
    nothing: the condition, whether it hides (True) or shows, and the number. None for others."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Where" or node.inputs[0] is None:
        return None
    numbers = [_number(_unexpanded(x)) for x in node.inputs[1:]]
    for i, number in enumerate(numbers):
        if numbers[1 - i] == 0.0 and number is not None and number <= LOWEST:
            return node.inputs[0], i == 0, number
    return None


def _unscaled(b: Builder, value: Value | None, scores: _Scores) -> Value | None:
    """An operand of the product without the numbers that it is multiplied by, which become a part
    of the scale."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type == "Transpose" and "perm" in attributes(node):
        inner = _unscaled(b, node.inputs[0], scores)
        if inner is None or inner is node.inputs[0]:
            return value
        return b.transpose(inner, attributes(node)["perm"])
    if node is None or node.op_type not in ("Mul", "Div"):
        return value
    for i, j in ((0, 1), (1, 0)) if node.op_type == "Mul" else ((0, 1),):
        number, inner = _number(node.inputs[j]), node.inputs[i]
        if number is None or inner is None or not 0.0 < number < math.inf:
            continue
        if type_of(inner) == type_of(node.outputs[0]):
            scores.factor *= number if node.op_type == "Mul" else 1.0 / number
            return _unscaled(b, inner, scores)
    return value


# ---- constants, and what is left


def _unexpanded(value: Value | None) -> Value | None:
    node = None if value is None else value.producer()
    if node is not None and node.op_type in ("Expand", "Identity", "StopGradient"):
        return _unexpanded(node.inputs[0])
    return value


def _narrow(value: Value) -> Value:
    """What a value was expanded from, with as many dims."""
    node = value.producer()
    inner = node.inputs[0] if node is not None and node.op_type == "Expand" else None
    kept = inner is not None and type_of(inner).rank == type_of(value).rank
    return value if inner is None or not kept else _narrow(inner)


def _number(value: Value | None) -> float | None:
    """The number that all elements of a constant equal; None for other values."""
    array = array_of(value)
    if array is None or array.size == 0 or array.dtype == bool:
        return None
    return float(array.reshape(-1)[0]) if (array == array.reshape(-1)[0]).all() else None


def _remove_unread(graph: Graph, last: Node, outputs: set[Value]) -> None:
    """Removes nodes that nobody reads any more, from `last` backwards."""
    stack = [last]
    while stack:
        node = stack.pop()
        if node.graph is None or any(y in outputs or list(y.consumers()) for y in node.outputs):
            continue
        makers = [x.producer() for x in node.inputs if x is not None]
        graph.remove([node])
        stack += [maker for maker in makers if maker is not None]


__all__ = ["fuse_attention"]
