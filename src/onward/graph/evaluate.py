"""Evaluates a graph with onnx's reference evaluator (numpy; slow and exact), as an oracle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onward.graph.build import Builder
from onward.graph.file import to_proto
from onward.graph.graph import Graph, Node, Role, array_of, attributes, type_of


class GatherElements(OpRun):
    """GatherElements of any size; onnx's evaluator takes at most 64 elements along the axis."""

    def _run(
        self, data: np.ndarray, indices: np.ndarray, axis: int | None = None
    ) -> tuple[np.ndarray]:
        at = (axis or 0) % data.ndim
        shown = tuple(slice(None) if i == at else slice(0, n) for i, n in enumerate(indices.shape))
        return (np.take_along_axis(data[shown], indices, at),)


def evaluate(graph: Graph, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Evaluates a graph; returns its outputs by name. feeds: every input by name."""
    session = ReferenceEvaluator(to_proto(graph), new_ops=[GatherElements])
    names = list(graph.outputs)
    wanted = {v.name or "": feeds[v.name or ""] for v in graph.inputs}
    with np.errstate(all="ignore"):
        results = session.run(None, wanted)
    return dict(zip(names, results, strict=True))  # type: ignore[arg-type]


def evaluate_constant(node: Node) -> list[np.ndarray]:
    """Evaluates a node whose inputs are all constants; returns its outputs."""
    single = Graph("constant")
    inputs = [
        None if v is None else single.input(f"x{i}", type_of(v), Role.BATCH)
        for i, v in enumerate(node.inputs)
    ]
    feeds: dict[str, np.ndarray] = {}
    for i, value in enumerate(node.inputs):
        array = array_of(value)
        if array is not None:
            feeds[f"x{i}"] = array
            inputs[i].meta["content"] = value.meta.get("content") or (  # type: ignore[union-attr]
                tuple(int(n) for n in array.reshape(-1))
                if array.dtype == np.int64 and array.ndim <= 1 and array.size <= 64
                else None
            )
    y = Builder(single).node(node.op_type, inputs, attributes(node))
    outputs = y if isinstance(y, tuple) else (y,)
    single.outputs = {f"y{i}": v for i, v in enumerate(outputs)}
    return list(evaluate(single, feeds).values())
