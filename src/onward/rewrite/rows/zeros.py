"""Zeros: where a value is exactly 0 because of the batch, whatever the parameters are.

Values that meet a factor of 0 are not read. Such a factor may be a mask, a softmax's weights over
scores that a mask hides, or a product with either. The answer is a `Demand` for the complement:
rows outside of which the value is 0. Two hazards are excluded here. A softmax with all scores
hidden has nonzero weights (equal ones, or NaN): its rows count as nonzero (`sets.Attended`). A
quotient 0 / 0 is NaN: a divisor must be nonzero, or be such that its zeros make the remaining rows
NaN or infinite anyway.

Where x is 0 for all parameters, changing the other factor changes neither the product nor its
gradient; as everywhere in row demand, values left out are assumed to be finite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onward.graph.graph import Node, Role, Value, array_of, attributes, role_of, type_of, where
from onward.graph.ops.reduce import reduced_dims
from onward.graph.types import Shape
from onward.rewrite.rows import sets
from onward.rewrite.rows.demand import Demand, met, regrouped, spread

# ops that map 0 to 0, elementwise
_KEEPS_ZERO = ("Identity", "StopGradient", "Neg", "Relu", "Tanh", "Cast", "Dropout", "Abs", "Erf")
_RESHAPES = ("Reshape", "Squeeze", "Unsqueeze")
_MOVES = (*_RESHAPES, "Expand", "Transpose")
Rows = Demand | None


class Zeros:
    """Finds zeros in the values of one graph. known: values that depend on the batch alone."""

    def __init__(self, known: frozenset[Value]) -> None:
        self._known = known
        self._nonzero: dict[Value, Rows] = {}
        self._shown: dict[Value, Rows] = {}

    def nonzero(self, value: Value | None) -> Rows:
        """Rows outside of which the value is 0; None where no zeros are known."""
        if value is None or array_of(value) is not None:
            return None
        if value not in self._nonzero:
            self._nonzero[value] = self._nonzero_of(value)
        return self._nonzero[value]

    def shown(self, value: Value | None) -> Rows:
        """Rows outside of which a score is so low that a softmax gives it no weight; None where
        none is known."""
        if value is None or array_of(value) is not None:
            return None
        if value not in self._shown:
            self._shown[value] = self._shown_of(value)
        return self._shown[value]

    def weighed(self, node: Node, k: int) -> Rows:
        """For input k of an addition of scores that only softmaxes read: the rows of k that get
        weight in one of them. None where k surely hides none."""
        shown, y = self.shown(node.inputs[k]), node.outputs[0]
        if shown is None:
            return None
        shift = type_of(y).rank - type_of(node.inputs[k]).rank
        found: Rows = None
        for reader in y.consumers():
            if reader.op_type != "Softmax":
                return None
            axis = attributes(reader).get("axis", -1) % type_of(y).rank - shift
            own = _attended(type_of(node.inputs[k]).shape, shown, axis)
            if own is None or (found is not None and found != own):
                return None
            found = own
        return found

    def truth(self, condition: Value | None, equal: bool = False) -> Rows:
        """Rows where a condition that depends on the batch alone is true; with `equal`, where it is
        false."""
        if condition not in self._known or array_of(condition) is not None:
            return None
        assert condition is not None
        return _tested(condition, 0, equal)

    def _nonzero_of(self, value: Value) -> Rows:
        node, found = value.producer(), None
        if node is not None:
            found = self._made_nonzero(node)
        if found is None and value in self._known and _of_batch(value):
            found = _tested(value, 0, False)
        return found

    def _made_nonzero(self, node: Node) -> Rows:
        match node.op_type:
            case "Mul":
                a, b = (_aligned(node, v, self.nonzero(v)) for v in node.inputs)
                return _both(type_of(node.outputs[0]).shape, a, b)
            case "Where":
                return self._chosen(node, lambda fill: bool((fill == 0).all()), self.nonzero)
            case "Div" if node.outputs[0] not in self._known:
                return self._quotient(node)
            case "Softmax":
                return self._weights(node)
            case "Exp":
                return self.shown(node.inputs[0])
            case op if op in _KEEPS_ZERO:
                return self.nonzero(node.inputs[0])
            case op if op in _MOVES:
                return _moved(node, self.nonzero(node.inputs[0]))
            case _:
                return None

    def _weights(self, node: Node) -> Rows:
        """Rows outside of which a softmax's result is 0. Where all scores along its dim are hidden,
        no row is."""
        x = node.inputs[0]
        shown = self.shown(x)
        if x is None or shown is None or shown.rows is None:
            return None
        axis = attributes(node).get("axis", -1) % type_of(x).rank
        return _attended(type_of(x).shape, shown, axis)

    def _shown_of(self, value: Value) -> Rows:
        node = value.producer()
        if value in self._known:
            return _above(value) if _may_hide(value) else None
        if node is None:
            return None
        match node.op_type:
            case "Where":
                return self._chosen(
                    node, lambda fill: bool((fill <= sets.HIDDEN).all()), self.shown
                )
            case "Add":
                found = [_aligned(node, v, self.shown(v)) for v in node.inputs]
                # the sum of two masks may overflow, or be inf - inf
                return found[0] if found[1] is None else found[1] if found[0] is None else None
            case "Identity" | "StopGradient":
                return self.shown(node.inputs[0])
            case op if op in _MOVES:
                return _moved(node, self.shown(node.inputs[0]))
            case _:
                return None

    def _chosen(
        self, node: Node, ends: Callable[[np.ndarray], bool], inner: Callable[[Value | None], Rows]
    ) -> Rows:
        """Rows outside of which a Where gives a constant for which `ends` is true. inner: the same
        question for the other side."""
        condition, *sides = node.inputs
        y = type_of(node.outputs[0]).shape
        for i, side in enumerate(sides):
            fill = array_of(_unexpanded(side))
            if fill is None or not ends(fill):
                continue
            taken = self.truth(condition, equal=i == 0)
            other = sides[1 - i]
            return _both(y, _aligned(node, condition, taken), _aligned(node, other, inner(other)))
        return None

    def _quotient(self, node: Node) -> Rows:
        top, bottom = node.inputs
        y = type_of(node.outputs[0]).shape
        found = _aligned(node, top, self.nonzero(top))
        if found is None or found.rows is None or bottom is None:
            return None
        divisor = array_of(bottom)
        if divisor is not None:
            return found if (divisor != 0).all() else None
        if bottom in self._known:  # rows of 0 / 0 count as nonzero
            none = _aligned(node, bottom, _tested(bottom, 0, True))
            if none is None or not set(none.dims) <= set(found.dims):
                return None
            more = spread(y, none, found.dims)
            return Demand(found.dims, sets.union([*found.rows, *more]))
        divisor = _unexpanded(bottom)
        if _is_positive(divisor):
            return found
        # if the divisor is the sum of the dividend and is 0, the remaining rows are NaN or infinite
        maker = None if divisor is None else divisor.producer()
        while maker is not None and maker.op_type in _RESHAPES:
            before = maker.inputs[0]
            maker = None if before is None else before.producer()
        if maker is None or maker.op_type != "ReduceSum" or maker.inputs[0] is not top:
            return None
        axes = maker.inputs[1] if len(maker.inputs) > 1 else None
        gone = [d for d in reduced_dims(axes, attributes(maker), len(y)) if d in found.dims]
        if type_of(top).shape != y or len(gone) != 1:
            return None
        return _attended(y, found, gone[0])


def weights_hint(value: Value | None) -> str:
    """The reason why a softmax that made a sum's weights is not known to hide rows; "" where no
    softmax made them, or no low number is in its scores."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in (*_MOVES, *_KEEPS_ZERO):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    if node is None or node.op_type != "Softmax" or node.inputs[0] is None:
        return ""
    name, made = f"the softmax at {where(node) or '(top)'}", node.inputs[0].producer()
    while made is not None and made.op_type in _MOVES:
        made = None if made.inputs[0] is None else made.inputs[0].producer()
    for x in () if made is None else made.inputs:
        if made is not None and made.op_type in ("Where", "Add") and (low := too_weak(x)):
            return f"{name} hides rows by {low}"
    return f"{name} hides no row"


def too_weak(value: Value | None) -> str:
    """The number with which an added or filled mask hides too weakly, and one that is low enough;
    "" where there is none."""
    fills = [float(a.min()) for a in _constants(_unexpanded(value)) if a.size]
    return weak_number(min(fills, default=0.0))


def weak_number(least: float) -> str:
    """Describes a number that is low, but not low enough to hide; "" for others."""
    if not sets.HIDDEN < least <= -100:
        return ""
    return f"{least:g}, which a score may outweigh (-inf or the dtype's finfo.min hides for sure)"


# ---- conditions


def _rows_of(shape: Shape) -> tuple[int, ...]:
    return tuple(d for d, n in enumerate(shape) if n != 1) or ((0,) if shape else ())


def _tested(value: Value, number: float, equal: bool) -> Rows:
    """The condition `value != number`, or `==` with `equal`, along the dims in which the value
    varies."""
    shape, found = type_of(value).shape, sets.test(value, number, equal)
    dims = _rows_of(shape)
    if not dims:
        return None
    node = found.value.producer()
    if node is not None and node.op_type == "Expand" and node.inputs[0] is not None:
        inner = _tested(node.inputs[0], found.number, found.equal)
        wide = _aligned(node, node.inputs[0], inner)
        if wide is not None:
            before = regrouped(wide.dims, type_of(found.value).shape, shape)
            if before:
                return Demand(before, wide.rows)
    return Demand(dims, frozenset({found}))


def _above(value: Value) -> Rows:
    """Rows where an added mask does not hide."""
    node, shape = value.producer(), type_of(value).shape
    if node is not None and node.op_type in _MOVES and node.inputs[0] is not None:
        inner = _above(node.inputs[0])
        if inner is not None and (found := _moved(node, inner)) is not None:
            return found
    dims = _rows_of(shape)
    return Demand(dims, frozenset({sets.Above(value, sets.HIDDEN)})) if dims else None


def _attended(shape: Shape, shown: Demand, axis: int) -> Rows:
    if axis not in shown.dims or shown.rows is None:
        return None
    sizes = tuple(shape[d] for d in shown.dims)
    found = sets.Attended(shown.rows, sizes, shown.dims.index(axis))
    return Demand(shown.dims, frozenset({found}))


def _both(y: Shape, a: Rows, b: Rows) -> Rows:
    if a is None or b is None:
        return b if a is None else a
    return met(y, a, b)


# ---- dims


def _aligned(node: Node, x: Value | None, rows: Rows) -> Rows:
    """The rows of an input as rows of the output that it broadcasts to."""
    if x is None or rows is None:
        return None
    y, shape = type_of(node.outputs[0]).shape, type_of(x).shape
    shift = len(y) - len(shape)
    if any(shape[d] != y[d + shift] for d in rows.dims):
        return None
    return Demand(tuple(d + shift for d in rows.dims), rows.rows)


def _moved(node: Node, rows: Rows) -> Rows:
    """The rows of an input as rows of the result of a node that moves dims."""
    x = node.inputs[0]
    if x is None or rows is None or rows.rows is None:
        return None
    y, shape = type_of(node.outputs[0]).shape, type_of(x).shape
    if node.op_type == "Expand":
        return _aligned(node, x, rows)
    if node.op_type == "Transpose":
        perm = attributes(node).get("perm") or list(reversed(range(len(shape))))
        turned = [perm.index(d) for d in rows.dims]
        order = sorted(range(len(turned)), key=lambda i: turned[i])
        sizes = tuple(shape[d] for d in rows.dims)
        return Demand(tuple(sorted(turned)), sets.permuted(rows.rows, sizes, order))
    dims = regrouped(rows.dims, shape, y)
    return Demand(dims, rows.rows) if dims else None


def _unexpanded(value: Value | None) -> Value | None:
    node = None if value is None else value.producer()
    return _unexpanded(node.inputs[0]) if node is not None and node.op_type == "Expand" else value


# ---- numbers


def _of_batch(value: Value) -> bool:
    """Whether a value depends on the batch's content, not only on its sizes."""
    stack, seen = [value], set[Value]()
    while stack:
        found = stack.pop()
        if found in seen:
            continue
        seen.add(found)
        if role_of(found) == Role.BATCH:
            return True
        node = found.producer()
        if node is not None and node.op_type not in ("Shape", "Size"):
            stack += [x for x in node.inputs if x is not None]
    return False


def _constants(value: Value | None) -> list[np.ndarray]:
    """The float constants that a value is computed from."""
    stack, seen = [value], set[Value]()
    found: list[np.ndarray] = []
    while stack:
        x = stack.pop()
        if x is None or x in seen:
            continue
        seen.add(x)
        array, node = array_of(x), x.producer()
        if array is not None:
            found += [array] if array.dtype.kind == "f" else []
        elif node is not None and len(seen) < 64:
            stack += node.inputs
    return found


def _may_hide(value: Value) -> bool:
    """Whether an added value can hide: it is part of the batch, or computed with a number low
    enough."""
    if not type_of(value).is_floating or not _of_batch(value):
        return False
    own = role_of(_source(value)) == Role.BATCH
    return own or any(bool((a <= sets.HIDDEN).any()) for a in _constants(value))


def _source(value: Value) -> Value:
    """The value that reshapes, expands and transposes have made this one of."""
    node = value.producer()
    moved = node is not None and node.op_type in _MOVES and node.inputs[0] is not None
    return _source(node.inputs[0]) if moved else value  # type: ignore[union-attr, arg-type]


def _is_positive(value: Value | None) -> bool:
    """Whether a value has a positive lower bound: `clamp(min=1e-9)`."""
    node = None if value is None else value.producer()
    if node is None:
        return False
    if node.op_type in _RESHAPES or node.op_type == "Sqrt":
        return _is_positive(node.inputs[0])
    if node.op_type not in ("Max", "Clip"):
        return False
    bounds = node.inputs[1:2] if node.op_type == "Clip" else node.inputs
    arrays = [array_of(x) for x in bounds]
    return any(a is not None and bool((a > 0).all()) for a in arrays)


__all__ = ["Zeros", "too_weak", "weights_hint"]
