"""Which rows of which value somebody needs: one walk from the outputs back to the inputs.

A rule per op says which rows of an input the asked rows of its outputs read. What no rule proves
is asked for as a whole, and remembers why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeAlias

import numpy as np

from onward.graph.graph import (
    Graph,
    Node,
    Value,
    array_of,
    attributes,
    content_of,
    role_of,
    type_of,
    where,
)
from onward.graph.infer import clamp_slice, reduced_dims
from onward.graph.names import user_name
from onward.graph.types import DType, Shape, Size, product
from onward.rewrite.rows import sets
from onward.rewrite.rows.known import batch_values
from onward.rewrite.rows.sets import Condition, Conditions, both, reached, union

ATTENTION = ("Attention", "FlashAttention")
ELEMENTWISE = frozenset(
    {
        "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Mod", "Where", "Neg", "Abs", "Sqrt",
        "Exp", "Log", "Tanh", "Erf", "Sigmoid", "Relu", "Sin", "Cos", "Reciprocal", "Sign", "Gelu",
        "Not", "And", "Or", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Cast",
        "Identity", "Clip", "Softplus", "Floor", "Ceil", "BiasActivation", "IsNaN", "IsInf",
    }
)  # fmt: skip
RESHAPES = ("Reshape", "Squeeze", "Unsqueeze")
REDUCTIONS = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare",
    "ReduceProd",
)  # fmt: skip


@dataclass(frozen=True)
class Demand:
    """The rows of a value that are read: indices of `dims` that meet a condition of `rows`.

    rows None: all of the value, because of `why` ("" where there was nothing to save). keys: some
    of it is read as the keys of an attention.
    """

    dims: tuple[int, ...] = ()
    rows: Conditions | None = None
    keys: bool = False
    why: str = ""

    @property
    def whole(self) -> bool:
        return self.rows is None


def all_of(why: str) -> Demand:
    return Demand(why=why)


NOTHING_TO_SAVE = all_of("")


@dataclass(frozen=True)
class Question:
    """A node whose outputs are asked for, under a rule. `known`: values that follow from the batch
    alone."""

    node: Node
    asked: tuple[Demand | None, ...]  # by output
    known: frozenset[Value]

    @property
    def demand(self) -> Demand:
        """That of the only output asked for."""
        (demand,) = (d for d in self.asked if d is not None)
        return demand

    @property
    def attrs(self) -> dict[str, Any]:
        return attributes(self.node)

    def x(self, i: int = 0) -> Value:
        value = self.node.inputs[i]
        assert value is not None
        return value

    def shape(self, i: int = 0) -> Shape:
        return type_of(self.x(i)).shape

    @property
    def y(self) -> Shape:
        return type_of(self.node.outputs[0]).shape

    def is_known(self, i: int) -> bool:
        return i < len(self.node.inputs) and self.node.inputs[i] in self.known

    def passed(self) -> list[Demand | None]:
        """All of every input, for what the output is wanted whole for."""
        return [all_of(self._why) for _ in self.node.inputs]

    def refused(self, reason: str = "") -> list[Demand | None]:
        """All of every input: because of this node, unless there was a reason before."""
        here = f"{self.node.op_type} at {where(self.node) or '(top)'}"
        why = self._why or (f"{here}: {reason}" if reason else here)
        return [all_of(why) for _ in self.node.inputs]

    @property
    def _why(self) -> str:
        return next((d.why for d in self.asked if d is not None and d.why), "")


Answer: TypeAlias = "list[Demand | None]"
Rule: TypeAlias = Callable[[Question], Answer]
RULES: dict[str, Rule] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


# ---- the walk


def demands(
    graph: Graph, outputs: Iterable[str], without: Collection[str] = ()
) -> dict[Value, Demand]:
    """What is asked of every value that the outputs need and that is not known from the batch.

    without: reasons for wanting a value whole that are taken not to be there.
    """
    known = batch_values(graph)
    found: dict[Value, Demand] = {}
    for name in outputs:
        value = graph.outputs[name]
        why = "" if type_of(value).rank == 0 else f"output '{user_name(name)}'"
        if why not in without:
            found[value] = all_of(why)
    for node in reversed(list(graph)):
        asked = tuple(found.get(y) for y in node.outputs)
        if all(d is None for d in asked) or node.outputs[0] in known:
            continue
        question = Question(node, asked, known)
        function = RULES.get(node.op_type)
        answer = function(question) if function is not None else question.refused()
        for x, demand in zip(node.inputs, answer, strict=False):
            if x is None or demand is None or x in known or role_of(x) is not None:
                continue
            if content_of(x) is not None:
                continue  # a size: it reads no row
            if demand.whole and demand.why in without:
                continue
            held = found.get(x)
            found[x] = demand if held is None else merged(type_of(x).shape, held, demand)
    return found


def merged(shape: Shape, a: Demand, b: Demand) -> Demand:
    """What both ask of a value of this shape."""
    if a.rows is None or b.rows is None:
        return a if a.rows is None and (a.why or b.rows is not None) else b
    dims = tuple(sorted({*a.dims, *b.dims}))
    rows = union([*spread(shape, a, dims), *spread(shape, b, dims)])
    return Demand(dims, rows, a.keys or b.keys)


def spread(shape: Shape, demand: Demand, dims: tuple[int, ...]) -> Conditions:
    """The demand's rows as rows of more dims."""
    assert demand.rows is not None
    if demand.dims == dims or not demand.rows:
        return demand.rows
    sizes = tuple(shape[d] for d in dims)
    inner = tuple(dims.index(d) for d in demand.dims)
    return frozenset({sets.Spread(demand.rows, sizes, inner)})


def met(shape: Shape, demand: Demand, dims: tuple[int, ...], condition: Condition) -> Demand:
    """The demand's rows that also meet a condition on the indices of `dims`."""
    if demand.rows is None:
        return Demand(dims, frozenset({condition}))
    every = tuple(sorted({*demand.dims, *dims}))
    one = spread(shape, Demand(dims, frozenset({condition})), every)
    rows = spread(shape, demand, every)
    (other,) = one
    return Demand(every, both(rows, other), demand.keys)


# ---- where dims go


def aligned(demand: Demand, y: Shape, x: Shape) -> Demand:
    """Through broadcasting. An input that lacks some of the dims is small: all of it."""
    if demand.rows is None:
        return demand
    shift = len(y) - len(x)
    dims = tuple(d - shift for d in demand.dims)
    if any(d < 0 or x[d] != y[d + shift] for d in dims):
        return NOTHING_TO_SAVE
    return replace(demand, dims=dims)


def regrouped(dims: Sequence[int], y: Shape, x: Shape) -> tuple[int, ...] | None:
    """The dims of `x` that `dims` of its reshaped form `y` are made of; None where they mix."""
    found: list[int] = []
    for group in _runs(dims):
        before, within = product(y[: group[0]]), product(y[d] for d in group)
        ends = [i for i in range(len(x) + 1) if product(x[:i]) == before]
        pairs = [(i, j) for i in ends for j in range(i, len(x) + 1) if product(x[i:j]) == within]
        if not pairs or 0 in (*y, *x):  # which makes all products equal
            return None
        # of dims of size 1 at the edges, take those that belong to a run of the same length
        best = min(pairs, key=lambda p: (abs(p[1] - p[0] - len(group)), -p[0]))
        found += range(*best)
    return tuple(found) if len(set(found)) == len(found) else None


def _runs(dims: Sequence[int]) -> list[list[int]]:
    """Neighbours together: `0, 1, 3` is `[0, 1], [3]`."""
    runs: list[list[int]] = []
    for d in dims:
        if runs and runs[-1][-1] == d - 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    return runs


# ---- rules: rows as they are


def _rest(q: Question, answer: dict[int, Demand]) -> Answer:
    """Parameters and seeds have no rows to save."""
    return [answer.get(i, NOTHING_TO_SAVE) for i in range(len(q.node.inputs))]


@rule(*ELEMENTWISE)
def _elementwise(q: Question) -> Answer:
    special = {"Mul": _masked_product, "Where": _where}.get(q.node.op_type)
    if special is not None and (answer := special(q)) is not None:
        return answer
    return [aligned(q.demand, q.y, q.shape(i)) for i in range(len(q.node.inputs))]


def _row_mask(q: Question, i: int) -> tuple[int, ...] | None:
    """The dims of the output along which the known input `i` varies, where they are rows."""
    if not q.is_known(i) or array_of(q.x(i)) is not None:
        return None
    shift, shape = len(q.y) - len(q.shape(i)), q.shape(i)
    if any(size != 1 and size != q.y[d + shift] for d, size in enumerate(shape)):
        return None
    dims = tuple(d + shift for d, size in enumerate(shape) if size != 1)
    return dims if dims and len(q.y) - 1 not in dims else None


def _masked_product(q: Question) -> Answer | None:
    """`x * m`: where the batch alone makes m 0, nothing of x is left (x taken to be finite)."""
    for x, m in ((0, 1), (1, 0)):
        dims = _row_mask(q, m)
        if dims is not None and q.shape(x) == q.y:
            demand = met(q.y, q.demand, dims, sets.test(q.x(m)))
            return _rest(q, {x: demand})
    return None


def _where(q: Question) -> Answer | None:
    """Each side only where the batch's condition chooses it."""
    dims = _row_mask(q, 0)
    if dims is None:
        return None
    answer: dict[int, Demand] = {}
    for i, chosen in ((1, sets.test(q.x(0))), (2, sets.test(q.x(0), equal=True))):
        demand = met(q.y, q.demand, dims, chosen)
        answer[i] = aligned(demand, q.y, q.shape(i))
    return _rest(q, answer)


@rule("Dropout")
def _dropout(q: Question) -> Answer:
    return _rest(q, {0: q.demand})


@rule("Expand")
def _expand(q: Question) -> Answer:
    return _rest(q, {0: aligned(q.demand, q.y, q.shape())})


@rule("LayerNormalization", "Softmax", "LogSoftmax")
def _along_a_dim(q: Question) -> Answer:
    """A row is normalised by itself, unless the rows are what is normalised."""
    demand = united(q.y, q.asked)
    dim = q.attrs.get("axis", -1) % len(q.shape())
    inner = range(dim, len(q.shape())) if q.node.op_type == "LayerNormalization" else (dim,)
    if any(d in inner for d in demand.dims):
        return q.refused("it normalises over the rows")
    return _rest(q, {0: demand})


@rule("AddLayerNormalization")
def _add_layer_norm(q: Question) -> Answer:
    demand = united(q.y, q.asked)
    if len(q.y) - 1 in demand.dims:
        return q.refused("it normalises over the rows")
    return _rest(q, {0: demand, 1: demand})


def united(shape: Shape, asked: Iterable[Demand | None]) -> Demand:
    """What all of them together ask for, of values with the same rows."""
    return reduce(partial(merged, shape), [d for d in asked if d is not None])


@rule("Gemm")
def _gemm(q: Question) -> Answer:
    demand = q.demand
    if demand.rows is None:
        return q.passed()
    if demand.dims != (0,) or q.attrs.get("transA"):
        return q.refused("its rows are mixed")
    answer = {0: demand}
    if len(q.node.inputs) > 2 and q.node.inputs[2] is not None:
        answer[2] = aligned(demand, q.y, q.shape(2))
    return _rest(q, answer)


@rule("MatMul")
def _matmul(q: Question) -> Answer:
    demand = q.demand
    if demand.rows is None:
        return q.passed()
    if len(q.shape(1)) != 2:
        return q.refused("both factors have rows")
    if len(q.y) - 1 in demand.dims:
        return q.refused("its rows are mixed")
    return _rest(q, {0: demand})


# ---- rules: rows that move


@rule(*RESHAPES)
def _reshape(q: Question) -> Answer:
    demand = q.demand
    if demand.rows is None:
        return q.passed()
    dims = regrouped(demand.dims, q.y, q.shape())
    if not dims:  # mixed with others, or a single row
        return q.refused("what follows reads whole sequences")
    return _rest(q, {0: replace(demand, dims=dims)})


@rule("Transpose")
def _transpose(q: Question) -> Answer:
    demand = q.demand
    if demand.rows is None:
        return q.passed()
    perm = q.attrs.get("perm") or list(reversed(range(len(q.y))))
    dims = tuple(perm[d] for d in demand.dims)
    if list(dims) != sorted(dims):
        return q.refused("it changes the order of the rows")
    return _rest(q, {0: replace(demand, dims=dims)})


@rule("Split")
def _split(q: Question) -> Answer:
    dim = q.attrs.get("axis", 0) % len(q.y)
    demand = united(q.y, q.asked)
    if demand.rows is None:
        return q.passed()
    if dim in demand.dims:
        return q.refused("it splits the rows")
    return _rest(q, {0: demand})


@rule("Concat")
def _concat(q: Question) -> Answer:
    demand, dim = q.demand, q.attrs["axis"] % len(q.y)
    if demand.rows is None:
        return q.passed()
    if dim not in demand.dims:
        return [demand] * len(q.node.inputs)
    sizes, place = tuple(q.y[d] for d in demand.dims), demand.dims.index(dim)
    answer: Answer = []
    start: Size = 0
    for i in range(len(q.node.inputs)):
        length = q.shape(i)[dim]
        part = sets.Part(demand.rows, sizes, place, start, length)
        answer.append(replace(demand, rows=frozenset({part})))
        start = start + length
    return answer


@rule("Slice")
def _slice(q: Question) -> Answer:
    shape, demand = q.shape(), q.demand
    starts, ends = content_of(q.x(1)), content_of(q.x(2))
    axes = content_of(q.x(3)) if len(q.node.inputs) > 3 else None
    steps = content_of(q.x(4)) if len(q.node.inputs) > 4 else (1,)
    if starts is None or ends is None or len(starts) != 1 or steps != (1,):
        return q.refused("a slice of several dims, or in steps")
    dim = int(axes[0]) % len(shape) if axes else 0  # type: ignore[arg-type]
    first, last = clamp_slice(starts[0], ends[0], shape[dim])
    if dim in demand.dims and demand.rows is not None:
        sizes = tuple(shape[d] for d in demand.dims)
        place = demand.dims.index(dim)
        moved = sets.Moved(demand.rows, sizes, place, first, last - first)
        return _rest(q, {0: replace(demand, rows=frozenset({moved}))})
    if dim == len(shape) - 1:  # features
        return _rest(q, {0: demand}) if demand.rows is not None else q.passed()
    return _rest(q, {0: _windowed(shape, demand, dim, first, last)})


def _windowed(shape: Shape, demand: Demand, dim: int, first: Any, last: Any) -> Demand:
    """The demand where an index is in a range; with the dims before it, rows can be numbered."""
    dims = tuple(range(dim + 1))
    window = sets.Window(tuple(shape[d] for d in dims), dim, first, last)
    return met(shape, demand, dims, window)


@rule("Gather")
def _gather(q: Question) -> Answer:
    """Rows of a parameter at ids that are computed; or chosen rows of what is computed."""
    shape, demand, dim = q.shape(), q.demand, q.attrs.get("axis", 0) % len(q.shape())
    if role_of(q.x()) is not None:
        return _rest(q, {1: _ids(q, demand, dim)})
    if not q.is_known(1) or dim == len(shape) - 1:
        return q.refused("rows are chosen by what is computed")
    k = len(q.shape(1))
    kept = demand.rows is not None and all(d < dim for d in demand.dims)
    outer = demand if kept else all_of("")  # what is asked behind the dim only narrows
    index = array_of(q.x(1))
    if k == 0 and index is not None:
        at = int(index)
        at = at if at >= 0 else shape[dim] + at
        return _rest(q, {0: _windowed(shape, outer, dim, at, at + 1)})
    listed = sets.Listed(q.x(1), (shape[dim],), nested=False)
    dims = tuple(range(dim + 1))
    sizes = tuple(shape[d] for d in dims)
    spread = sets.Spread(frozenset({listed}), sizes, (dim,)) if dim else listed
    return _rest(q, {0: met(shape, outer, dims, spread)})


def _ids(q: Question, demand: Demand, dim: int) -> Demand:
    """Of ids: rows are those of the result."""
    if demand.rows is None or dim != 0 or any(d >= len(q.shape(1)) for d in demand.dims):
        return all_of(demand.why)
    return demand


@rule("Embedding")
def _embedding(q: Question) -> Answer:
    return _rest(q, {1: _ids(q, q.demand, 0)})


@rule("GatherND")
def _gather_nd(q: Question) -> Answer:
    depth = q.shape(1)[-1]
    if not q.is_known(1) or q.attrs.get("batch_dims", 0) or not isinstance(depth, int):
        return q.refused("rows are chosen by what is computed")
    dims = tuple(range(depth))
    listed = sets.Listed(q.x(1), tuple(q.shape()[:depth]), nested=True)
    return _rest(q, {0: Demand(dims, frozenset({listed}))})


@rule(*REDUCTIONS)
def _reduce(q: Question) -> Answer:
    demand, shape = q.demand, q.shape()
    axes = q.node.inputs[1] if len(q.node.inputs) > 1 else None
    gone = reduced_dims(axes, q.attrs, len(shape))
    if demand.rows is None:
        return q.passed() if gone == [len(shape) - 1] else q.refused("it sums over the rows")
    keep = q.attrs.get("keepdims", 1)
    kept = list(range(len(shape))) if keep else [d for d in range(len(shape)) if d not in gone]
    dims = tuple(kept[d] for d in demand.dims)
    if any(d in gone for d in dims):
        return q.refused("it sums over the rows")
    return _rest(q, {0: replace(demand, dims=dims)})


# ---- rules: rows that are annihilated


def _all_counted(labels: Value, ignored: int) -> bool:
    """Whether no label can be the ignored one: constants, or the rows' own numbers."""
    array, node = array_of(labels), labels.producer()
    if array is not None:
        return not bool((array == ignored).any())
    return node is not None and node.op_type == "Range" and ignored < 0


@rule("LinearCrossEntropy")
def _linear_cross_entropy(q: Question) -> Answer:
    """Rows whose label is the ignored one count for nothing."""
    if not q.is_known(3):
        return q.refused("its labels are computed")
    if _all_counted(q.x(3), int(q.attrs["ignore_index"])):
        return [NOTHING_TO_SAVE for _ in q.node.inputs]
    counted = sets.test(q.x(3), int(q.attrs["ignore_index"]))
    return _rest(q, {0: Demand((0,), frozenset({counted}))})


@rule("SoftmaxCrossEntropyLoss", "CrossEntropyLoss")
def _cross_entropy(q: Question) -> Answer:
    if not q.is_known(1) or any(d is not None for d in q.asked[1:]) or len(q.shape()) != 2:
        return q.refused("its labels are computed, or its probabilities are read")
    if _all_counted(q.x(1), int(q.attrs.get("ignore_index", -100))):
        return [NOTHING_TO_SAVE for _ in q.node.inputs]
    counted = sets.test(q.x(1), int(q.attrs.get("ignore_index", -100)))
    # whichever of its losses are asked for: eager refuses a label that is no class anywhere
    return _rest(q, {0: Demand((0,), frozenset({counted}))})


@rule(*ATTENTION)
def _attention(q: Question) -> Answer:
    """Queries as the output; keys and values where some of these queries may look."""
    if any(d is not None for d in q.asked[1:]):
        return q.refused("its row sums are read")
    demand = q.demand
    if demand.rows is not None and demand.dims != (0, 2):
        return q.refused("its rows are mixed")
    shapes = [q.shape(i) for i in range(3)]
    if any(len(s) != 4 or s[0] != shapes[0][0] for s in shapes):
        return q.refused("heads that are shared")
    seen = visible(q, demand.rows)
    if seen is None:
        why = demand.why or f"{q.node.op_type} at {where(q.node) or '(top)'}: no mask hides a key"
        keys = all_of(why)
    else:
        keys = Demand((0, 2), seen, keys=True)
    mask = all_of("")
    return _rest(q, {0: demand, 1: keys, 2: keys, 3: mask})


def visible(q: Question, members: Conditions | None) -> Conditions | None:
    """The keys that these queries may see; None for all."""
    (batch, _, length, _), keys = q.shape(), q.shape(1)
    queries, places = (batch, length), (batch, keys[2])
    addends = [m for m in _known_addends(q) if (a := array_of(m)) is None or _hides(a)]
    mask = next(iter(batch_masks(q)), None)
    causal = bool(q.attrs.get("is_causal"))
    if mask is not None and type_of(mask).dtype != DType.BOOL and (causal or len(addends) > 1):
        return None  # where each of two hides what the other shows, their sum hides nothing
    near = None if members is None else reached(members, queries, places, causal)
    shown = None if mask is None else frozenset({_shown(mask, members, queries, places)})
    if near is None or shown is None:
        return near if shown is None else shown
    (condition,) = shown
    return both(near, condition)


def batch_masks(q: Question) -> list[Value]:
    """An attention's mask, or those of its addends that the batch alone decides."""
    return [m for m in _known_addends(q) if array_of(m) is None]


def _known_addends(q: Question) -> list[Value]:
    """What of an attention's mask follows from the batch, or is a constant."""
    mask = q.node.inputs[3] if len(q.node.inputs) > 3 else None
    stack, found = [mask], []
    while stack:
        value = stack.pop()
        if value is None:
            continue
        node = value.producer()
        if value in q.known:
            found.append(value)
        elif node is not None and node.op_type in ("Add", "Expand"):
            stack += node.inputs[: 2 if node.op_type == "Add" else 1]
    return found


def _hides(mask: np.ndarray) -> bool:
    """Whether a constant mask hides some key, alone."""
    return bool((~mask if mask.dtype == bool else mask <= sets.HIDDEN).any())


def _shown(mask: Value, members: Conditions | None, queries: Shape, keys: Shape) -> Condition:
    if key_mask(mask, keys):
        return sets.test(mask)
    return sets.Seen(mask, members, queries, keys)


def key_mask(mask: Value, keys: Shape) -> bool:
    """Whether it is `b[B,1,1,S]`: the same for all queries."""
    shape = type_of(mask).shape
    return type_of(mask).dtype == DType.BOOL and shape == (keys[0], 1, 1, keys[1])
