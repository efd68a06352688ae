"""Calls of every op that tensor parallelism has rules for, with sizes that ranks divide; and a way
of each run on ranks in lockstep, as the rule says it can be.

Most are the calls of `op_cases` with every size that is not 1 made eight times as large; others,
whose sizes stand among their inputs, are written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import op_cases
from after_forward import after_forward
from op_cases import Bits, Given, Input, Known, OpCase, Real, Whole, ints, r

from onward.distribute import Collectives, lockstep, ranks_of
from onward.distribute.tensor.sharding import (
    NORM,
    PARTIAL,
    REPLICATED,
    ROWS,
    Sharding,
    TensorCut,
    split,
)
from onward.distribute.tensor.ways import RankPlace, Shardings, Way, rules_of, same_op, ways_of
from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Node, Role, Value, type_of
from onward.graph.ops import OPS, OWN
from onward.graph.types import DType, Type, parse_type
from onward.mesh_sizes import METHODS

FACTOR = 8
_BY_HAND = frozenset({
    "Reshape", "Expand", "Split", "Slice", "Gather", "Embedding", "ScatterND", "Attention",
    "FlashAttention", "FlashAttentionGrad", "SoftmaxCrossEntropyLoss", "CrossEntropyLoss",
    "SoftmaxCrossEntropyLossGrad", "LinearCrossEntropy", "LinearCrossEntropyGrad",
    "GroupedMatMul", "GroupedOuter",
})  # fmt: skip


def _spread(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(n if n <= 1 else n * FACTOR for n in shape)


def _larger(item: Input) -> Input:
    match item:
        case Real(shape) | Bits(shape):
            return replace(item, shape=_spread(shape))
        case Whole(shape) if shape != (2,):  # (2,) is a seed
            return replace(item, shape=_spread(shape))
        case Given(array):
            return Given(np.tile(array, [1 if n <= 1 else FACTOR for n in array.shape]))
        case _:
            return item


def _labels(shape: tuple[int, ...], classes: int, ignored: int = -100) -> Given:
    """Labels of all classes, some of them ignored."""
    found = np.arange(int(np.prod(shape))) * 5 % classes
    found[2::7] = ignored
    return Given(found.reshape(shape))


def _losses() -> Iterator[OpCase]:
    for attrs in (
        {"reduction": "mean", "ignore_index": -100}, {"reduction": "sum", "ignore_index": 3},
        {"reduction": "none", "ignore_index": -100}, {},
    ):  # fmt: skip
        ignored = int(attrs.get("ignore_index", -100))
        for shape, rows in (((8, 24), (8,)), ((3, 8, 4), (3, 4))):
            labels = _labels(rows, shape[1], ignored)
            if attrs:  # without attributes the op of the standard ignores no label
                yield OpCase("SoftmaxCrossEntropyLoss", (r(*shape), labels), attrs)
            given = r(*rows) if attrs.get("reduction") == "none" else r()
            for smooth in (0.0, 0.125):
                more = {"label_smoothing": smooth, **attrs}
                gradient = (given, r(*shape, low=-4, high=-0.1), labels)
                yield OpCase("SoftmaxCrossEntropyLossGrad", gradient, more)
                if smooth:
                    yield OpCase("CrossEntropyLoss", (r(*shape), labels), more)
        if attrs.get("reduction", "none") == "none":
            continue
        labels = _labels((8,), 24, ignored)
        for bias in (None, r(24)):
            for smooth in (0.0, 0.125):
                more = {"label_smoothing": smooth, **attrs}
                head = (r(8, 5), r(24, 5), bias, labels)
                yield OpCase("LinearCrossEntropy", (*head, None), more)
                yield OpCase("LinearCrossEntropyGrad", (r(), *head, None), more)


def _attention() -> Iterator[OpCase]:
    """The sample calls of the records with four times the heads, and so with four more groups."""
    for op in ("Attention", "FlashAttention", "FlashAttentionGrad"):
        for attrs, texts in OWN[op].cases:
            types = [None if t is None else parse_type(t) for t in texts]
            wide = [t if t is None or t.rank < 3 or t.shape[1] == 1 else
                    t.with_shape((t.shape[0], t.shape[1] * 4, *t.shape[2:]))
                    for t in types]  # fmt: skip
            inputs = [op_cases._of_type(op, i, wide, attrs) for i in range(len(wide))]
            yield after_forward(OpCase(op, tuple(inputs), attrs))


def _attention_rows() -> Iterator[OpCase]:
    """The sample calls of the records that are not packed, with 8 queries and, where these are
    others, 7 keys; with their own heads, and with so many that ranks exchange them."""
    sizes = {5: 8, 6: 7}
    rows, seen = r(2, 3, 8, 4), Given(np.tri(8, dtype=bool)[None, None, ::-1].repeat(2, axis=0))
    drops = {"scale": 0.5, "is_causal": 0, "ratio": 0.25, "site": 1, "sample_dim": 0}
    seed, offset = Whole((2,), 0, 99), Given(np.array(3))
    yield OpCase("FlashAttention", (rows, rows, rows, seen, seed, offset), drops)
    for op, first in (("Attention", 0), ("FlashAttention", 0), ("FlashAttentionGrad", 1)):
        for attrs, texts in OWN[op].cases:
            types = [None if t is None else parse_type(t) for t in texts]
            if any(t is not None and t.dtype == DType.INT64 and t.rank == 2 for t in types):
                continue
            for times in (1, 4):
                wide = [t if t is None else t.with_shape(
                            times * n if i == 1 and t.rank > 2 and n != 1
                            else n if i == 0 and t.rank == 4 else sizes.get(int(n), n)  # type: ignore[arg-type]
                            for i, n in enumerate(t.shape))
                        for t in types]  # fmt: skip
                q = wide[first]
                assert q is not None and q.shape[2] == 8
                inputs = [op_cases._of_type(op, i, wide, attrs) for i in range(len(wide))]
                yield after_forward(OpCase(op, tuple(inputs), attrs))


IN_FEW_BITS = ("8Bit", "Bf16")  # ends of names of ops


def _in_blocks() -> Iterator[OpCase]:
    """The sample calls of updates with moments in few bits, of parts that are whole blocks of 256,
    or whole rows of 1,024 elements that are rounded by one key."""
    for op in (op for op in OWN if op.endswith(IN_FEW_BITS) and rules_of(op)):
        for attrs, texts in OWN[op].cases:
            wide = {"f32[3,171]": "f32[32,512]", "u8[3,171]": "u8[32,512]", "f32[3]": "f32[64]"}
            wide |= {"f32[4,6]": "f32[32,128]"}
            types = [None if t is None else parse_type(wide.get(t, t)) for t in texts]
            inputs = [op_cases._of_type(op, i, types, attrs) for i in range(len(types))]
            yield OpCase(op, tuple(inputs), attrs)


def _others() -> Iterator[OpCase]:
    for shape, to in (
        ((3, 24), (3, 2, 12)), ((3, 24), (3, 4, 6)), ((3, 24), (3, 3, 8)), ((3, 24), (3, 3, 4, 2)),
        ((3, 4, 6), (3, 24)), ((3, 3, 8), (3, 24)), ((3, 3, 8, 2), (3, 48)), ((8, 6), (48,)),
        ((5, 7, 8), (35, 8)), ((35, 8), (5, 7, 8)), ((8,), (1, 8)), ((8, 1), (8,)),
        ((1, 8, 5), (8, 5)), ((4, 6), (2, 12)), ((3, 8), (8, 3)),
    ):  # fmt: skip
        yield OpCase("Reshape", (r(*shape), ints(*to)))
    yield OpCase("Reshape", (r(4, 6, 8), ints(0, -1)))
    for shape, to in (((1, 8), (3, 8)), ((8,), (3, 8)), ((8, 1), (8, 5)), ((4, 8), (2, 4, 8))):
        yield OpCase("Expand", (r(*shape), ints(*to)))
    for shape, sizes, axis in (
        ((3, 24), (8, 8, 8), 1), ((24, 3), (8, 8, 8), 0), ((3, 24), (12, 12), -1),
        ((8, 24), (16, 8), 1), ((8, 24), (7, 17), 1),
    ):  # fmt: skip
        yield OpCase("Split", (r(*shape), ints(*sizes)), {"axis": axis})
    for shape, starts, ends, axes in (
        ((3, 24), (0,), (8,), (1,)), ((3, 24), (8,), (24,), (1,)), ((3, 24), (12,), (24,), (1,)),
        ((8, 24), (1,), (5,), (1,)), ((8, 24), (0, 12), (8, 24), (0, 1)),
        ((24, 3), (-8,), (99,), (0,)),
    ):  # fmt: skip
        yield OpCase("Slice", (r(*shape), ints(*starts), ints(*ends), ints(*axes)))
    wraps = Given(np.array([[0, 7, -1], [3, 4, -8]]))
    for axis, shape in ((0, (8, 3)), (1, (3, 8)), (1, (2, 8, 3)), (0, (8,)), (0, (8, 4))):
        yield OpCase("Gather", (r(*shape), wraps), {"axis": axis})
    yield OpCase("Gather", (r(5, 3), Whole((4, 8), 0, 5)), {"axis": 0})
    yield OpCase("Gather", (r(5, 3), Given(np.array(2))), {"axis": 0})
    yield OpCase(
        "Embedding", (r(8, 4), Given(np.array([[0, 7, 7], [3, 4, 1]]))), {"padding_idx": 0}
    )
    for reduction in ("add", "none"):
        rows = Given(np.array([[0], [7], [-1 if reduction == "add" else 2], [3], [4]]))
        yield OpCase("ScatterND", (r(8, 4), rows, r(5, 4)), {"reduction": reduction})
        pairs = Given(np.array([[[0, 3], [7, 1]]]))
        yield OpCase("ScatterND", (r(8, 4, 8), pairs, r(1, 2, 8)), {"reduction": reduction})
    grid = Given(np.array([[[0], [7]], [[7], [3]]]))
    yield OpCase("ScatterND", (r(8, 4, 2), grid, r(2, 2, 4, 2)), {"reduction": "add"})
    yield OpCase("Concat", (r(3), r(1), r(2)), {"axis": 0})
    yield OpCase("Concat", (r(8, 4), r(8, 4), r(8, 4)), {"axis": 1})
    yield OpCase("Pad", (r(4, 8), ints(0, 1, 0, 2), Known(np.array(0.5))))
    yield OpCase("Gemm", (r(8, 4), r(4, 12), r(1, 12)), {"alpha": 0.5, "beta": 2.0})
    yield OpCase("Gemm", (r(4, 8), r(12, 4), r(8, 1)), {"transA": 1, "transB": 1})
    yield OpCase("Gemm", (r(4, 8), r(4, 12), r()), {"transA": 1})
    ends = Given(np.array([3, 3, 7, 12, 12, 20, 22, 22]))  # of 24 rows, two of no group
    yield OpCase("GroupedMatMul", (r(24, 8), r(8, 8, 24), ends))
    yield OpCase("GroupedOuter", (r(24, 8), r(24, 16), ends))
    yield OpCase("ReduceSum", (r(24, 8), ints(1)), {"keepdims": 0})
    yield OpCase("ReduceSum", (r(24, 8), ints(0)), {"keepdims": 0})
    yield OpCase("Softmax", (r(8, 8),), {"axis": 0})
    yield OpCase("Unsqueeze", (r(24), ints(1)))
    yield OpCase("Unsqueeze", (r(24), ints(0)))
    yield OpCase("Squeeze", (r(24, 1), ints(1)))
    yield OpCase("Mul", (r(24, 8), r(8)))
    yield OpCase("Mul", (r(24, 8), r(24, 1)))
    yield OpCase("Mul", (r(24), r(8, 24)))


@cache
def calls() -> tuple[OpCase, ...]:
    """All calls, of ops that have rules."""
    found = [*_others(), *_losses(), *_attention(), *_attention_rows(), *_in_blocks()]
    for case in (*op_cases.CASES, *op_cases.ONWARD_CASES):
        if case.op not in _BY_HAND and not case.op.endswith(IN_FEW_BITS) and rules_of(case.op):
            inputs = tuple(map(_larger, case.inputs))
            if sum(_elements(x) for x in inputs) < 1 << 17:
                found.append(OpCase(case.op, inputs, case.attrs))
    return op_cases._labelled(found)


def _elements(item: Input) -> int:
    match item:
        case Real(shape) | Bits(shape) | Whole(shape):
            return int(np.prod(shape))
        case _:
            return 0


def node_of(graph: Graph) -> Node:
    """The node of a graph that is one call."""
    return next(iter(graph))


def ways(node: Node, ranks: int) -> list[Way]:
    """Every way of a call that begins with one input, or with all, in some sharding."""
    found: list[Way] = []
    types = [None if x is None or x.const_value is not None else type_of(x) for x in node.inputs]
    whole = tuple(None if x is None else REPLICATED for x in node.inputs)
    givens: list[Shardings] = []
    for i, type in enumerate(types):
        if type is None:
            continue
        for s in shardings(type, ranks):
            alike = [t is not None and t.rank == type.rank and s.fits(t, ranks) for t in types]
            every = [s if same else w for same, w in zip(alike, whole, strict=True)]
            givens += [(*whole[:i], s, *whole[i + 1 :]), tuple(every)]
    for given in dict.fromkeys(givens):
        for method in ("", *METHODS) if "Attention" in node.op_type else ("",):
            found += [w for w in ways_of(node, ranks, given, method) if not w.is_whole]
    kept: dict[tuple[Any, ...], Way] = {}
    for way in found:
        kept.setdefault((way.inputs, way.outputs, way.method), way)
    return list(kept.values())


def shardings(type: Type, ranks: int) -> list[Sharding]:
    """The shardings that a value of this type may have, in up to three groups."""
    found = [split(d, g) for d in range(type.rank) for g in (1, 2, 3)]
    terms = [PARTIAL, Sharding(terms=NORM)] if type.is_floating else []
    if type.is_floating and type.rank:
        terms.append(Sharding(terms=ROWS, owner="x2"))  # the name of the ends of groups
    return [*(s for s in found if s.fits(type, ranks)), *terms]


def owned(rows: int, ranks: int, ends: np.ndarray | None) -> list[slice]:
    """The rows of each rank's groups, which end as said, and of the last one also those of no
    group; without groups parts but for the last row."""
    if ends is None:
        return [slice(at * rows // ranks, (at + 1) * rows // ranks - (at == ranks - 1))
                for at in range(ranks)]  # fmt: skip
    lasts = [0, *ends[len(ends) // ranks - 1 :: len(ends) // ranks]]
    return [slice(first, last) for first, last in pairwise([*lasts[:-1], rows])]


def cut(
    x: np.ndarray, sharding: Sharding, ranks: int, ends: np.ndarray | None = None
) -> list[np.ndarray]:
    """What each rank has of x. ends: of the groups of rows, where there are any."""
    if sharding.terms == ROWS:
        parts = [np.full_like(x, np.nan) for _ in range(ranks)]
        for part, own in zip(parts, owned(len(x), ranks, ends), strict=True):
            part[own] = x[own]
        return parts
    if sharding.dim is not None:
        return [TensorCut("tp", ranks, at, sharding).part(x) for at in range(ranks)]
    rng = np.random.default_rng(5)
    if sharding.terms == NORM:
        shares = rng.uniform(0.5, 1.0, ranks)
        shares /= np.linalg.norm(shares)
        return [(x * share).astype(x.dtype) for share in shares]
    if sharding == PARTIAL:
        terms = [rng.uniform(-2, 2, x.shape).astype(x.dtype) for _ in range(ranks - 1)]
        return [*terms, (x - sum(terms)).astype(x.dtype)]
    return [x] * ranks


def joined(
    parts: Sequence[np.ndarray], sharding: Sharding, ends: np.ndarray | None = None
) -> np.ndarray:
    """The value of which the ranks have these parts or terms, computed in f64; rows of no rank are
    0. ends: of the groups of rows, where there are any."""
    if sharding.terms == ROWS:
        whole = np.zeros_like(parts[0])
        for part, own in zip(parts, owned(len(whole), len(parts), ends), strict=True):
            whole[own] = part[own]
        return whole
    if sharding.dim is not None:
        return TensorCut("tp", len(parts), 0, sharding).joined(parts)
    wide = [p.astype(np.float64) if p.dtype.kind == "f" else p for p in parts]
    made: dict[str, Any] = {
        "sum": lambda: sum(wide), "max": lambda: np.max(wide, axis=0),
        "norm": lambda: np.sqrt(sum(p * p for p in wide)), "all": lambda: np.all(parts, axis=0),
    }  # fmt: skip
    if sharding.terms:
        return made[sharding.terms]()
    for part in parts[1:]:
        np.testing.assert_array_equal(part, parts[0], err_msg="ranks differ in what is whole")
    return parts[0]


def feeds_of(case: OpCase, way: Way) -> dict[str, np.ndarray]:
    """Every input of the whole call. Where one is a norm, none is negative."""
    feeds = case.feeds()
    if any(s is not None and s.terms == NORM for s in way.inputs):
        return {name: np.abs(x) if x.dtype.kind == "f" else x for name, x in feeds.items()}
    return feeds


def wanted(case: OpCase, way: Way) -> list[np.ndarray]:
    """The results of the whole call, by onnx's reference evaluator; rows of no rank are 0."""
    found = list(evaluate(case.graph(), feeds_of(case, way)).values())
    for y, s in zip(found, way.outputs, strict=True):
        if s.terms == ROWS and ends_of(case, way) is None:
            y[-1:] = 0
    return found


def ends_of(case: OpCase, way: Way) -> np.ndarray | None:
    """The ends of the groups of rows of a call; None where it has none."""
    return feeds_of(case, way)["x2"] if case.op.startswith("Grouped") else None


def run(case: OpCase, way: Way, ranks: int) -> list[list[np.ndarray]]:
    """What each rank makes by a way, result by result, in lockstep."""
    whole = case.graph()
    node, feeds = node_of(whole), feeds_of(case, way)
    meshes, graphs, given = ranks_of(("tp",), (ranks,)), [], []
    ends = ends_of(case, way)
    parts = {name: cut(x, way.inputs[int(name[1:])] or REPLICATED, ranks, ends)
             for name, x in feeds.items()}  # fmt: skip
    for at, mesh in enumerate(meshes):
        graph = Graph()
        inputs: list[Value | None] = []
        for i, x in enumerate(node.inputs):
            if x is None:
                inputs.append(None)
            elif x.const_value is not None:
                inputs.append(graph.constant(x.const_value.numpy()))
            else:
                local = parts[f"x{i}"][at]
                kind = Type(DType.from_numpy(local.dtype), local.shape)
                inputs.append(graph.input(f"x{i}", kind, Role.BATCH))
        place = RankPlace("tp", ranks, at, Collectives(graph, mesh), {})
        b = Builder(graph)
        made = way.program(b, node, inputs, place) if way.program else same_op(b, node, inputs)
        graph.outputs = {f"y{i}": y for i, y in enumerate(made)}
        for y, s, old in zip(made, way.outputs, node.outputs, strict=True):
            assert type_of(y) == s.local(type_of(old), ranks), f"{way}: {type_of(y)}"
        graphs.append(graph)
        given.append({name: x[at] for name, x in parts.items()})
    found = lockstep(meshes, graphs, given)
    return [[outputs[f"y{i}"] for outputs in found] for i in range(len(node.outputs))]


__all__ = ["calls", "cut", "ends_of", "joined", "node_of", "run", "shardings", "wanted", "ways"]
assert set(_BY_HAND) <= set(OPS)
