"""Export in fp16 or bf16: casts by the cast policy, weights stored in the low type.

Ops that the policy keeps in fp32 (statistics of norms, softmax, the residual stream) stay fp32, and
so do the weights that only such ops read. Inputs and outputs keep their types.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, attributes, type_of
from onward.graph.names import user_name
from onward.graph.types import DType, rounded

DTYPES = {"float32": DType.FLOAT, "float16": DType.FLOAT16, "bfloat16": DType.BFLOAT16}

Arrays = dict[str, np.ndarray]


def read_dtype(dtype: object) -> DType:
    """Parses the dtype of an export. Raises OnwardError for an unknown name."""
    found = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if found is None:
        raise OnwardError(
            f"dtype={dtype!r} is not a dtype of export_onnx; fix: one of {', '.join(DTYPES)}"
        )
    return found


def lowered(graph: Graph, arrays: Mapping[str, np.ndarray], low: DType) -> tuple[Graph, Arrays]:
    """Stores weights in type `low` where the graph, which has the policy's casts, casts them to
    that type only. Returns the changed graph, and its weights by graph input.

    Raises OnwardError for a weight with a number that `low` cannot represent.
    """
    stored = dict(arrays)
    for value in graph.inputs_with(Role.PARAM, Role.BUFFER):
        name = value.name or ""
        if _store(graph, value, low):
            stored[name] = _narrow(name, arrays[name], low)
    return graph, stored


def _store(graph: Graph, value: Value, low: DType) -> bool:
    """Changes a weight to the low type where every reader casts it to that type or gathers rows of
    it, which are cast up after the gather. Returns whether it did."""
    nodes = list(dict.fromkeys(use.node for use in value.uses()))
    rows = [n for n in nodes if n.op_type == "Gather" and n.inputs[0] is value]
    casts = [n for n in nodes if n.op_type == "Cast" and type_of(n.outputs[0]).dtype == low]
    held = value in graph.output_values() or type_of(value).dtype != DType.FLOAT
    if held or not nodes or len(rows) + len(casts) < len(nodes):
        return False
    value.meta["type"] = type_of(value).with_dtype(low)
    for node in casts:
        graph.replace(node.outputs[0], value)
    for node in rows:
        b = Builder.at(graph, node)
        found = b.one("Gather", list(node.inputs), attributes(node))
        graph.replace(node.outputs[0], b.Cast(found, to=DType.FLOAT))
    graph.remove([*casts, *rows])
    return True


def _narrow(name: str, array: np.ndarray, low: DType) -> np.ndarray:
    made = rounded(array, low)
    lost = np.isfinite(array) & ~np.isfinite(made.astype(np.float32))
    if lost.any():
        raise OnwardError(
            f"the weight {user_name(name)} has {float(array[lost][0]):.3g}, which "
            f"{low.name.lower()} cannot represent; fix: dtype='bfloat16', or 'float32'"
        )
    return made


__all__ = ["DTYPES", "lowered", "read_dtype"]
