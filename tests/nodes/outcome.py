"""What becomes of one node test: its results by the executor, its gradients against differences.

The results are those that the test gives, to its own tolerance. A gradient is that of
`sum(result * weights)` with fixed random weights: by our rules, run in fp64, beside central
differences of onnx's reference evaluator in fp64, along random directions; and beside torch's
autograd, element by element (`autograd.py`).
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from nodes.autograd import by_torch
from nodes.cases import NodeCase, is_floating
from nodes.doubled import doubled
from nodes.engine import BFLOAT16, EQUAL, Feeds, execute, imported, line, moved
from nodes.reasons import OF_GRADIENTS, OF_RESULTS, OF_TORCH
from onnx.reference import ReferenceEvaluator

from onward.differentiate import vjp
from onward.graph.graph import Graph, type_of
from onward.graph.types import DType

FOLDED = "computed while it is read"
NOTHING = "nothing to differentiate"
EQUAL_BY_KERNELS = "equal to differences of our forward"
DIRECTIONS, STEP = 2, 1e-6


def result(case: NodeCase) -> str:
    """`EQUAL`, `FOLDED`, or why it does not run, or how it differs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _check_types(case.feeds | case.wants)
            graph = imported(case.model, case.feeds)
            have = execute(graph, case.feeds)
        except Exception as error:
            return line(error)
    for name, want in case.wants.items():
        try:
            assert have[name].dtype == np.asarray(want).dtype, f"{have[name].dtype}"
            np.testing.assert_allclose(_wide(have[name]), _wide(want), case.rtol, case.atol)
        except AssertionError as error:
            return f"differs: {line(error)}"
    return FOLDED if not len(graph) and not graph.inputs else EQUAL


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype == BFLOAT16 else x


def _check_types(values: Mapping[str, Any]) -> None:
    for x in values.values():
        if not isinstance(x, np.ndarray | np.generic):
            raise ValueError(f"a {type(x).__name__} is no tensor")
        if x.dtype.name not in _TYPES:
            raise ValueError(f"elements of {x.dtype}")


_TYPES = {
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
}


# ---- gradients


def judged(case: NodeCase) -> tuple[str, str, str]:
    """What the results come to, and the gradients: beside differences, beside torch's autograd."""
    first = result(case)
    if first.startswith("differs") or first.startswith("cannot"):
        first = _reason(OF_RESULTS, case, first)
    if first != EQUAL:
        return first, NOTHING, NOTHING
    second = gradient(case)
    if second not in (EQUAL, EQUAL_BY_KERNELS, NOTHING):
        second = _reason(OF_GRADIENTS, case, second)
    if second == NOTHING:
        return first, NOTHING, NOTHING
    third = by_torch(case)
    if third.startswith("differs"):
        third = _reason(OF_GRADIENTS | OF_TORCH, case, third)
    return first, second, third


def _reason(reasons: Mapping[str, str], case: NodeCase, found: str) -> str:
    return next((why for name, why in reasons.items() if re.search(name, case.name)), found)


def gradient(case: NodeCase) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _gradient(case)
        except Exception as error:
            return line(error)


def _gradient(case: NodeCase) -> str:
    model = doubled(case.model)
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    free = {v.name for v in imported(case.model, case.feeds).inputs}
    feeds = {
        n: x if not is_floating(x) else moved(x, rng) if n in free else x.astype(np.float64)
        for n, x in case.feeds.items()
    }
    graph = imported(model, feeds)
    wrt = [v.name or "" for v in graph.inputs if type_of(v).is_floating]
    ends = [n for n, y in graph.outputs.items() if type_of(y).is_floating]
    if not wrt or not ends:
        return NOTHING
    if any(n.op_type == "Cast" and type_of(n.outputs[0]).dtype == DType.FLOAT for n in graph):
        return "no differences: it computes in fp32 by its definition"
    shapes: dict[str, Any] = {n: type_of(graph.outputs[n]).concrete.shape for n in ends}
    weights = {
        n: rng.uniform(0.5, 2.0, shape) * rng.choice([-1.0, 1.0], shape)
        for n, shape in shapes.items()
    }
    step = vjp(graph, ends, wrt, wrt)
    for n in set(step.outputs) - set(step.signature.gradients.values()):
        step.outputs.pop(n)
    why = ""
    for evaluate in (_by_onnx(model), _by_kernels(graph)):
        if evaluate.slow(case):
            continue
        try:
            function = _Sum(evaluate.run, weights, feeds)
        except Exception as error:  # the evaluator does not take fp64 everywhere
            why = why or line(error)
            continue
        given = {
            **feeds,
            **{at: function.weights[n] for n, at in step.signature.cotangents.items()},
        }
        have = execute(step, given)
        found = [_differs(function, feeds, n, have[step.signature.gradients[n]], rng) for n in wrt]
        if not any(found):
            return evaluate.equal
        why = why or next(filter(None, found))
    return why


class _Sum:
    """The sum of the finite results times weights; those of others become 0."""

    def __init__(self, evaluate: Evaluate, weights: Mapping[str, np.ndarray], feeds: Feeds) -> None:
        self.evaluate, start = evaluate, evaluate(feeds)
        self.finite = {n: np.isfinite(start[n]) for n in weights}
        self.weights = {n: w * self.finite[n] for n, w in weights.items()}

    def __call__(self, feeds: Feeds) -> float:
        found = self.evaluate(feeds)
        total = 0.0
        for n, w in self.weights.items():
            total += float((np.where(self.finite[n], found[n], 0.0).astype(np.float64) * w).sum())
        return total


Evaluate = Callable[[Feeds], dict[str, np.ndarray]]


# The reference evaluator takes minutes for these.
SLOW = ("MaxPool", "AveragePool", "LpPool")


@dataclass(frozen=True)
class _Evaluator:
    """What a gradient is compared with the differences of."""

    run: Evaluate
    equal: str
    slow: Callable[[NodeCase], bool] = lambda case: False


def _by_kernels(graph: Graph) -> _Evaluator:
    """Our own forward in fp64, whose results in fp32 are the test's: for the ops that the reference
    evaluator computes in fp32 inside."""
    return _Evaluator(lambda feeds: execute(graph, feeds), EQUAL_BY_KERNELS)


def _by_onnx(model: onnx.ModelProto) -> _Evaluator:
    session, names = ReferenceEvaluator(model), [o.name for o in model.graph.output]

    def evaluate(feeds: Feeds) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            found: Any = session.run(None, dict(feeds))
        return {n: np.asarray(y) for n, y in zip(names, found, strict=True)}

    return _Evaluator(evaluate, EQUAL, lambda case: case.ops[0] in SLOW)


def _differs(
    loss: _Sum,
    feeds: Feeds,
    name: str,
    got: np.ndarray,
    rng: np.random.Generator,
) -> str:
    x = feeds[name]
    for _ in range(DIRECTIONS):
        v = rng.uniform(0.5, 1.0, x.shape) * rng.choice([-1.0, 1.0], x.shape)
        ends = [loss({**feeds, name: x + sign * STEP * v}) for sign in (1.0, -1.0)]
        want, have = (ends[0] - ends[1]) / (2 * STEP), float((got * v).sum())
        scale = 1.0 + abs(want) + float(np.abs(got * v).sum())
        if not abs(have - want) <= 1e-5 * scale:
            return f"differs by {name}: {have:.6g} for {want:.6g}"
    return ""
