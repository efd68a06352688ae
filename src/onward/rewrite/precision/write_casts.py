"""Adds the casts of a policy: each op gets its operands in the policy's type, which sets the type
of its results. A value is cast once for all its readers."""

from __future__ import annotations

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, array_of, attributes, type_of
from onward.graph.ops import OPS
from onward.graph.ops.call import Call
from onward.graph.types import DType, rounded
from onward.rewrite.precision.policy import Line, Policy, Precision


def write_casts(graph: Graph, policy: Policy) -> int:
    """Adds the policy's casts and returns their number. Only f32 values are cast down: an fp64
    model stays as it is. Outputs keep their types."""
    writer = _Writer(graph, policy)
    types = {name: type_of(value).dtype for name, value in graph.outputs.items()}
    for node in list(graph):
        writer.cast_operands(node)
    for name, value in graph.outputs.items():
        graph.outputs[name] = writer.cast(value, types[name], None)
    for node in graph:
        node.metadata_props.pop("precision", None)  # the types express it now
    return writer.casts


class _Writer:
    def __init__(self, graph: Graph, policy: Policy) -> None:
        self._graph, self._policy = graph, policy
        self._made: dict[tuple[Value, DType], Value] = {}
        self.casts = 0

    def cast_operands(self, node: Node) -> None:
        if node.op_type == "Cast":  # a cast of the model's own keeps its type
            return
        line = self._policy.line(node)
        changed = False
        for i, x in enumerate(node.inputs):
            wanted = None if x is None else self._wanted(line, node, i)
            if x is None or wanted is None or type_of(x).dtype == wanted:
                continue
            node.replace_input_with(i, self.cast(x, wanted, node))
            changed = True
        if changed or any(x is not None and type_of(x).is_low for x in node.inputs):
            self._settle(node)

    def _wanted(self, line: Line, node: Node, i: int) -> DType | None:
        """The type that operand i of a node must have; None: any."""
        low = self._policy.low
        kind = type_of(node.inputs[i]).dtype
        if kind not in (DType.FLOAT, low):
            return None
        if line.precision is Precision.LOW:
            of_line = line.operands is None or i in line.operands
            return low if of_line else DType.FLOAT
        if line.precision is Precision.FULL:
            return DType.FLOAT
        if line.others_stay and line.operands is not None and i not in line.operands:
            return DType.FLOAT
        return self._widest(line, node)

    def _widest(self, line: Line, node: Node) -> DType:
        """The widest type among a node's floating operands. A constant counts as low if that loses
        nothing."""
        low = self._policy.low
        asked = enumerate(node.inputs)
        asked = (x for i, x in asked if line.operands is None or i in line.operands)
        floating = [x for x in asked if x is not None and type_of(x).is_floating]
        computed = [x for x in floating if array_of(x) is None]
        if not computed or any(type_of(x).dtype != low for x in computed):
            return DType.FLOAT
        exact = all(_is_exact(array, low) for x in floating if (array := array_of(x)) is not None)
        return low if exact else DType.FLOAT

    def cast(self, x: Value, dtype: DType, reader: Node | None) -> Value:
        """Returns x in this type; a single cast, before the first reader, serves all readers."""
        if type_of(x).dtype == dtype:
            return x
        made = self._made.get((x, dtype))
        if made is not None:
            return made
        array = array_of(x)
        if array is not None:
            made = self._graph.constant(rounded(array, dtype))
        else:
            at = Builder(self._graph) if reader is None else Builder.at(self._graph, reader)
            made = at.Cast(x, to=dtype)  # before this reader, which is the first one
            self.casts += 1
        self._made[(x, dtype)] = made
        return made

    def _settle(self, node: Node) -> None:
        """Infers the dtypes of a node's outputs again; their sizes stay."""
        op = OPS[node.op_type]
        types = op.types(Call(node.op_type, list(node.inputs), attributes(node)))
        for value, type in zip(node.outputs, types, strict=False):
            value.meta["type"] = type_of(value).with_dtype(type.dtype)


def _is_exact(array: np.ndarray, dtype: DType) -> bool:
    return bool((rounded(array, dtype).astype(array.dtype) == array).all())


__all__ = ["write_casts"]
