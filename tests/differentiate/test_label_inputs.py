"""Inputs of a graph that are labels of its loss, so that a rank without rows may have them not
count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onward.differentiate import label_inputs
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value
from onward.graph.types import parse_type

IGNORED = -100


def loss(b: Builder, x: Value, labels: Value, **attrs: object) -> Value:
    made = b.SoftmaxCrossEntropyLoss(
        x, labels, **{"ignore_index": IGNORED, "reduction": "mean", **attrs}
    )
    return made[0] if isinstance(made, tuple) else made


Make = Callable[[Builder, Value, Value], Value]
FLAT = "i64[B,4]"


def moved(b: Builder, x: Value, y: Value) -> Value:
    """Labels as a causal model has them: shifted, and filled up with one that does not count."""
    filler = b.const(np.full((), IGNORED))
    wide = b.Pad(b.slice(y, 1, 1, 4), b.ints([0, 0, 0, 1]), filler)
    return loss(b, x, b.reshape(wide, (-1,)))


def joined(number: int) -> Make:
    def make(b: Builder, x: Value, y: Value) -> Value:
        more = b.const(np.full((4, 4), number))
        return loss(b, x, b.reshape(b.Concat(y, more, axis=0), (-1,)))

    return make


def padded_by_zeros(b: Builder, x: Value, y: Value) -> Value:
    wide = b.Pad(b.slice(y, 1, 1, 4), b.ints([0, 0, 0, 1]), b.const(np.zeros((), np.int64)))
    return loss(b, x, b.reshape(wide, (-1,)))


def computed(b: Builder, x: Value, y: Value) -> Value:
    return loss(b, x, b.reshape(b.Add(y, np.array(1)), (-1,)))


def as_ids(b: Builder, x: Value, y: Value) -> Value:
    table = b.const(np.ones((9, 9), np.float32))
    rows = b.reshape(b.Gather(table, b.transpose(y, [1, 0]), axis=0), (-1, 9))
    return loss(b, b.Add(x, b.ReduceMean(rows, b.ints([0]), keepdims=1)), b.reshape(y, (-1,)))


def distance(b: Builder, x: Value, y: Value) -> Value:
    return b.ReduceMean(b.Mul(x, x), b.ints([0, 1]), keepdims=0)


def summed(b: Builder, x: Value, y: Value) -> Value:
    return loss(b, x, b.reshape(y, (-1,)), reduction="sum")


CASES: dict[str, tuple[Make, dict[str, int] | str]] = {
    "moved": (moved, {"y": IGNORED}),
    "beside constants that do not count": (joined(IGNORED), {"y": IGNORED}),
    "beside constants that count": (joined(3), "labels are constants too"),
    "padded by labels that count": (padded_by_zeros, "labels are padded with labels that count"),
    "computed": (computed, "labels are computed by Add"),
    "ids as well": (as_ids, "y is read as ids too"),
    "a distance": (distance, "the loss is no mean of a cross entropy"),
    "a sum": (summed, "it is a sum, not a mean, of the cross entropies"),
}


@pytest.mark.parametrize("name", CASES)
def test_labels_are_found(name: str) -> None:
    make, want = CASES[name]
    graph = Graph()
    x = graph.input("x", parse_type("f32[N,9]"), Role.BATCH)
    y = graph.input("y", parse_type(FLAT), Role.BATCH)
    made = make(Builder(graph), x, y)
    out = graph.output("loss", made)
    graph.signature = graph.signature.but(loss=out)
    assert label_inputs(graph) == want
