"""Reads a ModelProto as a Graph: keeps nodes that a graph may hold, and decomposes others.

Model-local functions are inlined, results of constants are computed, and bodies of If, Loop and
Scan are unrolled where the number of iterations is known. Anything else is refused in one line that
names the node.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from onward.errors import one_line
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, array_of, content_of, type_of
from onward.graph.importer import decompositions, size_folding
from onward.graph.importer.decomposition import (
    DECOMPOSITIONS,
    NodeCall,
    plain,
    said_of,
    tensor_array,
)
from onward.graph.importer.draws import Draws
from onward.graph.importer.fold_bounds import FOLDED, Folds, require_sizes
from onward.graph.importer.local_functions import inlined
from onward.graph.importer.refused import REFUSED
from onward.graph.importer.size_conditions import conditions
from onward.graph.ops import STANDARD
from onward.graph.registry import files_of
from onward.graph.types import DType, Size, Type, symbol

Value = ir.Value
Environment = dict[str, Value | None]
OLDEST = 13  # oldest opset of models; nodes are read as in opset 20 or newer
# Ops whose older versions differ only in types: the first such version.
UNCHANGED = {
    "Add": 7, "Cast": 9, "Constant": 9, "Identity": 1, "If": 11, "Loop": 11, "Mul": 7,
    "Scan": 9, "Slice": 10, "Unsqueeze": 1,
}  # fmt: skip
NODES = 1 << 16  # most nodes, those of bodies counted as often as they are unrolled
BODIES = 2048  # most iterations and branches that are unrolled, loops within loops together

files_of(decompositions.__name__, decompositions.__path__)  # importing them fills the table
# Ops that have a decomposition although the standard has no such op: other domains', and those that
# onnxruntime's optimizer writes into the standard's domain.
BEYOND = frozenset(
    name for name in DECOMPOSITIONS if "." in name or name == "SimplifiedLayerNormalization"
)


def from_onnx(
    model: onnx.ModelProto,
    dims: Mapping[str, int] | None = None,
    known: Mapping[str, np.ndarray] | None = None,
    parameters: Mapping[str, str] | None = None,
    turned: Collection[str] = (),
    draws: bool = False,
    buffers: Mapping[str, str] | None = None,
) -> Graph:
    """Reads an ONNX model as a graph. Its inputs have `Role.BATCH`, its initializers are constants.

    dims: sizes for named dims; others stay symbolic. known: inputs that become constants, such as
    shapes. parameters: initializers that become inputs of `Role.PARAM`, each with the input's name;
    several may share one. turned: those of them whose input is the transpose. draws: whether
    Dropout in training mode becomes Onward's own, with the graph's random inputs; otherwise it is
    refused. buffers: initializers that become inputs of `Role.BUFFER`. Raises ValueError naming the
    first node that cannot be read, with the reason.
    """
    try:
        given = _Inputs(parameters or {}, turned, buffers or {})
        return _read(model, dims or {}, known or {}, given, draws)
    except Exception as error:  # any, for a model that onnx's checker would refuse
        raise ValueError(one_line(said_of(error), 400)) from error


def _read(
    model: onnx.ModelProto,
    dims: Mapping[str, int],
    known: Mapping[str, np.ndarray],
    given: _Inputs,
    draws: bool,
) -> Graph:
    model = inlined(model)
    _require_text(model.graph)
    graph = Graph(model.graph.name or "model")
    opsets = {o.domain: o.version for o in model.opset_import}
    reader = _Reader(graph, opsets, Draws(graph) if draws else None, _Work())
    env: Environment = {}
    tensors = {t.name: t for t in model.graph.initializer}
    constants = dict(known)
    constants |= {
        n: tensor_array(t) for n, t in tensors.items() if n not in given.names and n not in known
    }
    for info in model.graph.input:
        if info.name not in constants and info.name not in tensors:
            env[info.name] = graph.input(info.name, input_type(info, dims), Role.BATCH)
    env |= given.values(graph, tensors)
    for name, array in constants.items():
        env[name] = graph.constant(np.asarray(array))
    reader.read(model.graph.node, env)
    for info in model.graph.output:
        value = env.get(info.name)
        if info.name in reader.unmade:
            raise ValueError(f"the output {info.name} is a result that is not supported")
        if value is None:
            raise ValueError(f"no node produces the output {info.name}")
        graph.output(info.name, value)
    held = conditions(graph)
    graph.sweep()
    if lost := set(held) - set(conditions(graph)):  # of a cut of which only the shape is read
        size = min(map(str, lost))
        raise ValueError(
            f"cannot read a cut that holds where {size} is 0 or more, and whose elements nothing "
            "reads, over an open size; fix: give the dim a fixed size"
        )
    return graph


@dataclass(frozen=True)
class _Inputs:
    """Initializers that become inputs of a graph (`from_onnx`)."""

    parameters: Mapping[str, str]
    turned: Collection[str]
    buffers: Mapping[str, str]

    @property
    def names(self) -> set[str]:
        return {*self.parameters, *self.buffers}

    def values(self, graph: Graph, tensors: Mapping[str, onnx.TensorProto]) -> dict[str, Value]:
        """Adds the inputs to a graph. Returns the values that nodes read, by initializer."""
        made, found = dict[str, Value](), dict[str, Value]()
        for name, path in self.parameters.items():
            type = _type_of(tensors[name])
            is_turned = name in self.turned
            if path not in made:
                held = Type(type.dtype, type.shape[::-1]) if is_turned else type
                made[path] = graph.input(path, held, Role.PARAM)
            given = made[path]
            found[name] = Builder(graph).transpose(given, [1, 0]) if is_turned else given
        for name, path in self.buffers.items():
            found[name] = graph.input(path, _type_of(tensors[name]), Role.BUFFER)
        return found


def _type_of(tensor: onnx.TensorProto) -> Type:
    return Type(DType(tensor.data_type), tuple(tensor.dims))


def _require_text(graph: onnx.GraphProto) -> None:
    """Raises ValueError for names that are not UTF-8, which protobuf gives as bytes."""
    infos = [*graph.input, *graph.output]
    sizes = [d.dim_param for i in infos for d in i.type.tensor_type.shape.dim]
    for name in [graph.name, *(x.name for x in infos), *(n.name for n in graph.node), *sizes]:
        if not isinstance(name, str):
            raise ValueError(f"cannot read the name {name!r}, which is not UTF-8")


def input_type(info: onnx.ValueInfoProto, dims: Mapping[str, int]) -> Type:
    """The type of a model's input. dims: sizes for named dims. Raises ValueError for an input that
    is no tensor."""
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        raise ValueError(f"the input {info.name} is a {kind}, not a tensor")
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        raise ValueError(
            f"the input {info.name} has no shape; fix: give it one, with names for sizes that vary"
        )
    sizes: list[Size] = []
    for i, dim in enumerate(tensor.shape.dim):
        name = re.sub(r"\W", "_", dim.dim_param)
        if not name.strip("_0123456789"):  # "?" and "-1": any size, each its own
            name = f"{info.name}_{i}"
        given = int(dim.dim_value) if dim.HasField("dim_value") else 0
        # tools write 0, or a number below, where they mean any size
        sizes.append(given if given > 0 else dims.get(name, symbol(name)))
    if tensor.elem_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
        raise ValueError(f"the input {info.name} is of {kind}, not of numbers")
    return Type(DType(tensor.elem_type), tuple(sizes))


@dataclass
class _Work:
    """What reading one model has cost so far, the bodies of ops included."""

    nodes: int = 0
    bodies: int = 0
    folds: Folds = field(default_factory=Folds)


class _Reader:
    """Makes the nodes of one model, or of the body of an op in it."""

    def __init__(
        self, graph: Graph, opsets: Mapping[str, int], draws: Draws | None, work: _Work
    ) -> None:
        self.graph, self.opsets, self.draws, self.work = graph, opsets, draws, work
        self.opset = opsets.get("", opsets.get("ai.onnx", 1))
        self.unmade: set[str] = set()  # results that nodes have in ONNX and lack here

    def read(self, nodes: Sequence[onnx.NodeProto], env: Environment) -> None:
        """Makes nodes in order; adds their outputs to `env`."""
        for node in nodes:
            try:
                self._room(1)
                self.work.nodes += 1
                results = self._node(node, env)
                require_sizes([() if x is None else type_of(x).shape for x in results])
            except Exception as error:  # any, for a node that onnx's checker would refuse
                text = said_of(error)
                place = f"{node.op_type} {node.name}".strip()
                raise ValueError(
                    text if text.startswith("cannot") else f"cannot read {place}: {text}"
                ) from error
            for name, value in zip(node.output, results, strict=False):
                if name and value is None:
                    self.unmade.add(name)
                elif name:
                    env[name] = value

    def _node(self, node: onnx.NodeProto, env: Environment) -> Sequence[Value | None]:
        op_type = node.op_type
        if node.domain not in ("", "ai.onnx"):
            op_type = f"{node.domain}.{node.op_type}"
            if op_type not in DECOMPOSITIONS:
                raise ValueError(f"its domain {node.domain} is not standard ONNX")
        inputs: list[Value | None] = []
        for name in node.input:
            if name in self.unmade and name not in env:
                raise ValueError(f"its input {name} is a result that is not supported")
            if name and name not in env:
                raise ValueError(f"no node produces its input {name}")
            inputs.append(env[name] if name else None)
        while inputs and inputs[-1] is None:
            inputs.pop()
        given = {a.name: plain(onnx.helper.get_attribute_value(a)) for a in node.attribute}
        # the form up to opset 17
        if node.op_type.startswith(("Reduce", "Unsqueeze")) and "axes" in given:
            inputs.append(self.graph.constant(np.array(given.pop("axes"), np.int64)))
        schema = None if op_type in BEYOND else self._schema(op_type, given)
        for a in node.attribute:
            known: Any = None if schema is None else schema.attributes.get(a.name)
            if known is not None and a.type != int(known.type.value):
                raise ValueError(f"its attribute {a.name} is of another kind than the op's")
        if op_type in REFUSED:
            raise ValueError(REFUSED[op_type])

        def subgraph(body: onnx.GraphProto, values: Sequence[Value | None]) -> list[Value]:
            return self._subgraph(body, values, env)

        builder = Builder(self.graph, module=node.name)
        draws, count = self.draws, len(node.output)
        dropped = None if draws is None else partial(draws.dropped, builder)
        call = NodeCall(
            builder, op_type, inputs, given, schema, count, subgraph, dropped, self._room
        )
        folded = self._folded(node, call)
        if folded is not None:
            return folded
        of_sizes = size_folding.folded(call)
        if of_sizes is not None:
            return [of_sizes]
        made = self._made(node, call)
        return [made] if isinstance(made, ir.Value) else made

    def _made(self, node: onnx.NodeProto, call: NodeCall) -> Value | Sequence[Value | None]:
        if call.op_type in DECOMPOSITIONS:
            return DECOMPOSITIONS[call.op_type](call)
        if node.op_type in STANDARD:
            return call.b.node(node.op_type, call.inputs, call.given)
        body = self._function(node, call)
        if body is None:
            raise ValueError("this op is not supported")
        return self._expanded(node, call, body)

    def _schema(self, op_type: str, given: Mapping[str, Any]) -> onnx.defs.OpSchema:
        try:
            schema = onnx.defs.get_schema(op_type, self.opset, "")
        except onnx.defs.SchemaError as error:
            raise ValueError(f"opset {self.opset} has no such op") from error
        try:
            oldest = onnx.defs.get_schema(op_type, OLDEST, "").since_version
        except onnx.defs.SchemaError:
            oldest = 0
        oldest = min(oldest, UNCHANGED.get(op_type, oldest))
        strange = [n for n in given if n not in onnx.defs.get_schema(op_type, "").attributes]
        if schema.since_version < oldest or strange:
            raise ValueError(
                f"it has the form of opset {self.opset}; fix: convert the model to opset 20 "
                "or newer"
            )
        return schema

    # ---- what is known while reading

    def _folded(self, node: onnx.NodeProto, call: NodeCall) -> list[Value] | None:
        """The results of a node that depend only on constants or sizes; None for other nodes."""
        if node.op_type in ("Shape", "Size"):
            return self._sizes(call)
        arrays = [None if x is None else _array(x) for x in call.inputs]
        known = all((a is None) == (x is None) for a, x in zip(arrays, call.inputs, strict=True))
        graphs = any(isinstance(v, onnx.GraphProto) for v in call.given.values())
        if not known or graphs or node.op_type in ("Identity", "Constant"):
            return None
        if not self.work.folds.take(node.op_type, arrays, call.given):
            return None
        names = [f"x{i}" if a is not None else "" for i, a in enumerate(arrays)]
        alone = onnx.NodeProto()
        alone.CopyFrom(node)
        del alone.input[:]
        alone.input.extend(names)
        feeds = {n: a for n, a in zip(names, arrays, strict=True) if a is not None}
        infos = [
            onnx.helper.make_tensor_value_info(
                n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape
            )
            for n, a in feeds.items()
        ]
        made = [n for n in node.output if n]
        results = [onnx.helper.make_empty_tensor_value_info(n) for n in made]
        opsets = [onnx.helper.make_opsetid("", self.opset)]
        model = onnx.helper.make_model(
            onnx.helper.make_graph([alone], "folded", infos, results), opset_imports=opsets
        )
        try:
            with np.errstate(all="ignore"):
                found: Any = ReferenceEvaluator(model).run(None, feeds)
        except Exception:  # becomes a node where the evaluator cannot compute it
            return None
        if not all(isinstance(y, np.ndarray | np.generic) for y in found):
            return None
        if sum(np.asarray(y).size for y in found) > FOLDED:
            return None
        by_name = dict(zip(made, found, strict=True))
        return [self.graph.constant(np.asarray(by_name[n])) if n else None for n in node.output]  # type: ignore[misc]

    def _sizes(self, call: NodeCall) -> list[Value]:
        shape = call.shape()
        if call.op_type == "Size":
            return [call.b.squeeze(call.b.size(_product(shape)), [0])]
        rank = len(shape)
        start, end = int(call.attr("start", 0)), call.attr("end")
        end = rank if end is None else int(end)
        low = min(max(start + rank if start < 0 else start, 0), rank)
        high = min(max(end + rank if end < 0 else end, 0), rank)
        part = shape[low : max(low, high)]
        if all(isinstance(n, int) for n in part):
            return [call.b.ints([int(n) for n in part])]  # type: ignore[arg-type]
        return [call.b.Shape(call.x(), start=low, end=max(low, high))]

    # ---- bodies

    def _room(self, nodes: int) -> None:
        """Raises ValueError where so many more nodes are too many."""
        if self.work.nodes + nodes > NODES:
            raise ValueError(f"cannot read more than {NODES} nodes, bodies unrolled")

    def _subgraph(
        self, body: onnx.GraphProto, values: Sequence[Value | None], outer: Environment
    ) -> list[Value]:
        self.work.bodies += 1
        if self.work.bodies > BODIES:
            raise ValueError(f"cannot unroll loops of more than {BODIES} iterations in all")
        env = dict(outer)
        for tensor in body.initializer:
            env[tensor.name] = self.graph.constant(tensor_array(tensor))
        env.update({info.name: v for info, v in zip(body.input, values, strict=False)})
        self.read(body.node, env)
        found = [env.get(info.name) for info in body.output]
        if any(v is None for v in found):
            raise ValueError("a body does not make one of its outputs")
        return [v for v in found if v is not None]

    def _function(self, node: onnx.NodeProto, call: NodeCall) -> onnx.FunctionProto | None:
        """The function body by which ONNX defines the op; None where it has none."""
        schema: Any = call.schema
        if schema is None:
            return None
        if schema.has_function:
            versions = [
                v
                for v in schema.function_opset_versions
                if v <= max(self.opset, schema.since_version)
            ]
            text = schema.get_function_with_opset_version(
                max(versions or schema.function_opset_versions)
            )
        elif schema.has_context_dependent_function:
            types = [b"" if x is None else _type_proto(x) for x in call.inputs]
            versions = schema.context_dependent_function_opset_versions
            fitting = [v for v in versions if v <= max(self.opset, schema.since_version)]
            text = schema.get_context_dependent_function_with_opset_version(
                max(fitting or versions), node.SerializeToString(), types
            )
        else:
            return None
        if not text:
            return None
        function = onnx.FunctionProto()
        function.ParseFromString(text)
        return function

    def _expanded(
        self, node: onnx.NodeProto, call: NodeCall, body: onnx.FunctionProto
    ) -> list[Value | None]:
        env: Environment = {}
        for i, name in enumerate(body.input):
            env[name] = call.optional(i)
        opset = next(
            (o.version for o in body.opset_import if o.domain in ("", "ai.onnx")), self.opset
        )
        inner = _Reader(self.graph, {"": opset}, self.draws, self.work)
        nodes: list[onnx.NodeProto] = []
        for item in body.node:
            copy = onnx.NodeProto()
            copy.CopyFrom(item)
            copy.name = node.name or node.op_type
            del copy.attribute[:]
            for a in item.attribute:
                if not a.ref_attr_name:
                    copy.attribute.append(a)
                    continue
                value = call.attr(a.ref_attr_name)
                if value is not None:
                    copy.attribute.append(onnx.helper.make_attribute(a.name, value))
            for i, name in enumerate(copy.input):
                if name in env and env[name] is None:
                    copy.input[i] = ""
            nodes.append(copy)
        inner.read(nodes, env)
        return [env.get(name) for name in body.output]


def _array(x: Value) -> np.ndarray | None:
    found = array_of(x)
    if found is not None:
        return found
    content = content_of(x)
    if content is None or not all(isinstance(n, int) for n in content):
        return None
    return np.array(content, dtype=np.int64).reshape([int(n) for n in type_of(x).shape])  # type: ignore[arg-type]


def _product(shape: Sequence[Size]) -> Size:
    total: Size = 1
    for size in shape:
        total = total * size
    return total


def _type_proto(x: Value) -> bytes:
    type = type_of(x)
    shape = [s if isinstance(s, int) else str(s) for s in type.shape]
    return onnx.helper.make_tensor_type_proto(int(type.dtype), shape).SerializeToString()
