"""A sample call on tensors of less than f32, as what it means: computed in f32 between casts."""

from __future__ import annotations

from op_cases import OpCase

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, array_of, type_of
from onward.graph.types import DType


def between_casts(case: OpCase, dtype: DType) -> Graph:
    """With the inputs and outputs of `case.graph(dtype)`."""
    low, graph = case.graph(dtype), Graph(case.op)
    (node,) = low
    b, inputs = Builder(graph, module="model.layer"), list[Value | None]()
    for value in node.inputs:
        array = array_of(value) if value is not None else None
        if value is None:
            x = None
        elif array is not None:
            x = graph.constant(array)
        else:
            x = graph.input(str(value.name), type_of(value), Role.BATCH)
        inputs.append(b.cast(x, DType.FLOAT) if x is not None and type_of(x).is_low else x)
    made = b.node(case.op, inputs, case.attrs)
    outputs = made if isinstance(made, tuple) else (made,)
    graph.outputs = {
        f"y{i}": b.cast(y, type_of(said).dtype)
        for i, (y, said) in enumerate(zip(outputs, node.outputs, strict=True))
    }
    return graph
