"""Graph -> ONNX file: every stage can be saved, opened in a viewer, and run by another engine.

Each call of an `onward` op becomes a call of an ONNX function for its attributes and types, with
the op's body. Attributes and types are part of the function's *name*, since engines disagree about
overloads. The file says nothing about the machine or the source files, and equal graphs and weights
give equal bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onward.graph.batch_statistics import write_out_batch_statistics
from onward.graph.build import Builder, write_body
from onward.graph.graph import ONWARD, OPSET, Graph, Node, Role, Value, attributes, type_of
from onward.graph.opset import ir_version, settle_opset

LARGEST = 1_500_000_000  # bytes of tensors in one file; protobuf allows 2 GiB


def to_onnx(
    graph: Graph, weights: Mapping[str, np.ndarray] | None = None, opset: int = OPSET
) -> ir.Model:
    """Converts a graph to an ONNX model. weights: arrays for inputs that become initializers, by
    name. opset: one of `OPSETS`.

    The arrays are not copied until the model is serialized. Raises OnwardError for an op that the
    opset lacks.
    """
    copy = graph.clone()
    write_out_batch_statistics(copy)
    settle_opset(copy, opset)  # before outputs get their names
    for value in list(copy.ir.inputs):
        array = (weights or {}).get(value.name or "")
        if array is not None:
            copy.ir.inputs.remove(value)
            value.const_value = ir.tensor(array, name=value.name)
            copy.ir.register_initializer(value)
    _name_outputs(copy)
    functions: dict[str, ir.Function] = {}
    _call_functions(copy, functions, opset)
    for value in copy.ir.inputs:
        _write_type(value)
    for value in copy.ir.initializers.values():
        # whoever transposes a weight, as quantization does, would have to know of a second shape
        value.type = value.shape = None
    for node in copy:
        for value in node.outputs:
            _write_type(value)
    return ir.Model(
        copy.ir,
        ir_version=ir_version(opset),
        producer_name="onward",
        functions=list(functions.values()),
    )


def save(
    graph: Graph,
    path: Path,
    weights: Mapping[str, np.ndarray] | None = None,
    opset: int = OPSET,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the graph to `path`, and to `path.data` beside it where weights and constants exceed
    `LARGEST`. metadata: of the model, texts by key."""
    model = to_onnx(graph, weights, opset)
    model.metadata_props.update(metadata or {})
    held = (value.const_value for value in model.graph.initializers.values())
    nbytes = sum(tensor.nbytes for tensor in held if tensor is not None)
    ir.save(model, path, external_data=f"{path.name}.data" if nbytes > LARGEST else None)


def to_proto(graph: Graph, weights: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    return ir.to_proto(to_onnx(graph, weights))


def _write_type(value: Value) -> None:
    type = type_of(value)
    value.type = ir.TensorType(type.dtype)
    value.shape = ir.Shape([s if isinstance(s, int) else str(s) for s in type.shape])


def _name_outputs(graph: Graph) -> None:
    """Gives each output its own name, through an Identity for inputs and values that are named
    already."""
    b = Builder(graph)
    done: set[Value] = set()
    for name, value in graph.outputs.items():
        taken = {v.name for v in graph.inputs}
        if value.producer() is None or value in done:
            value = b.Identity(value)
        done.add(value)
        value.name = name if name not in taken else f"{name}.next"
        graph.ir.outputs.append(value)


def variant(node: Node) -> str:
    """The function name of an onward node: its op, then a digest of attributes and types."""
    types = [None if v is None else str(type_of(v)) for v in node.inputs]
    text = repr((node.op_type, sorted(attributes(node).items()), types))
    return f"{node.op_type}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _call_functions(graph: Graph, functions: dict[str, ir.Function], opset: int) -> None:
    for node in list(graph):
        if node.domain != ONWARD:
            continue
        name = variant(node)
        if name not in functions:
            functions[name] = _function(name, node, functions, opset)
        call = Node(
            ONWARD,
            name,
            [v for v in node.inputs if v is not None],
            outputs=[Value(name=v.name) for v in node.outputs],
            name=node.name,
            metadata_props=dict(node.metadata_props),
        )
        graph.ir.insert_before(node, call)
        for old, new in zip(node.outputs, call.outputs, strict=True):
            new.meta.update(old.meta)
            graph.replace(old, new)
        graph.ir.remove([node], safe=True)


def _function(name: str, node: Node, functions: dict[str, ir.Function], opset: int) -> ir.Function:
    body = Graph(name)
    inputs = [
        None if v is None else body.input(f"x{i}", type_of(v), Role.BATCH)
        for i, v in enumerate(node.inputs)
    ]
    b = Builder(body)
    results = write_body(b, node, inputs)
    for i, value in enumerate(results):
        out = b.Identity(value) if value.producer() is None or value in results[:i] else value
        body.outputs[f"y{i}"] = out
        body.ir.outputs.append(out)
    _call_functions(body, functions, opset)
    settle_opset(body, opset)
    # a function holds no initializers: constants become nodes at its head
    first = next(iter(body.ir))
    for value in list(body.ir.initializers.values()):
        tensor = value.const_value
        assert tensor is not None
        constant = Node("", "Constant", [], [ir.AttrTensor("value", tensor)], num_outputs=1)
        constant.outputs[0].name = f"{value.name}_c"
        body.ir.insert_before(first, constant)
        body.replace(value, constant.outputs[0])
        del body.ir.initializers[value.name]  # type: ignore[arg-type]
    body.ir.opset_imports.update({ONWARD: 1})
    return ir.Function(ONWARD, name, graph=body.ir, attributes=[])
