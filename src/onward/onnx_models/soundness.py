"""What every ONNX model has to be before it is read: names that are said once, tensors of the sizes
that they claim, attributes of one kind, opsets that there are.

The reader of nodes relies on it. One pass over the message, in time linear in its size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

import onnx
from onnx import AttributeProto, TensorProto

from onward.errors import OnwardError, one_line
from onward.onnx_models.tensors import bytes_of, count_of

DEEPEST = 32  # graphs within graphs
NODES = 1 << 16  # most nodes of a model, those of its bodies and functions included
STANDARD = ("", "ai.onnx")
NEWEST_IR = onnx.IR_VERSION
NEWEST = onnx.defs.onnx_opset_version()
_TYPED = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
# the field of each kind of attribute
_FIELDS: dict[int, str] = {
    AttributeProto.FLOAT: "f", AttributeProto.INT: "i", AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t", AttributeProto.GRAPH: "g", AttributeProto.SPARSE_TENSOR:
    "sparse_tensor", AttributeProto.TYPE_PROTO: "tp", AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints", AttributeProto.STRINGS: "strings", AttributeProto.TENSORS:
    "tensors", AttributeProto.GRAPHS: "graphs", AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTOS: "type_protos",
}  # fmt: skip


def check_model(model: onnx.ModelProto) -> None:
    """Raises OnwardError for a model that is not sound."""
    if not model.HasField("graph"):
        raise OnwardError("it has no graph")
    if not 0 < model.ir_version <= NEWEST_IR:
        raise OnwardError(
            f"its IR version is {model.ir_version}, and onnx {onnx.__version__} knows 1 to "
            f"{NEWEST_IR}; fix: a newer onnx, or a valid file"
        )
    _check_opsets(model.opset_import, "the model")
    check = _Check()
    check.graph(model.graph, 0)
    if not any(o.domain in STANDARD for o in model.opset_import) and model.graph.node:
        raise OnwardError("it imports no opset of standard ONNX")
    seen = Counter((f.domain, f.name, f.overload) for f in model.functions)
    for (_, name, _), times in seen.items():
        if times > 1:
            raise OnwardError(f"the function {_quoted(name)} is defined twice")
    for function in model.functions:
        check.text(function.name, function.domain, function.overload, *function.attribute)
        where = f"the function {_quoted(function.name)}"
        _check_opsets(function.opset_import, where)
        if len(set(function.input)) < len(function.input):
            raise OnwardError(f"{where} has two inputs of one name")
        check.nodes(function.node, set(function.input), where, 0)


def inner_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """The tensors of a model but for the graph's initializers: those of attributes, bodies,
    functions, training information."""
    bodies = [info.initialization for info in model.training_info]
    bodies += [info.algorithm for info in model.training_info]
    nodes = [*model.graph.node, *(node for f in model.functions for node in f.node)]
    attributes = [a for f in model.functions for a in f.attribute_proto]
    yield from _parts_of(model.graph.sparse_initializer)
    while bodies or nodes or attributes:
        if bodies:
            graph = bodies.pop()
            nodes += graph.node
            yield from graph.initializer
            yield from _parts_of(graph.sparse_initializer)
        elif nodes:
            attributes += nodes.pop().attribute
        else:
            a = attributes.pop()
            yield from [*([a.t] if a.HasField("t") else []), *a.tensors]
            yield from _parts_of([a.sparse_tensor] if a.HasField("sparse_tensor") else [])
            yield from _parts_of(a.sparse_tensors)
            bodies += [*([a.g] if a.HasField("g") else []), *a.graphs]


def _parts_of(sparse: Iterable[onnx.SparseTensorProto]) -> Iterator[TensorProto]:
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


class _Check:
    def __init__(self) -> None:
        self.count = 0

    def graph(self, graph: onnx.GraphProto, depth: int) -> None:
        where = f"the graph {_quoted(graph.name)}"
        if depth > DEEPEST:
            raise OnwardError(f"it nests graphs deeper than {DEEPEST}")
        if graph.sparse_initializer:
            raise OnwardError(f"{where} has sparse tensors, which are not supported")
        inputs = [info.name for info in graph.input]
        held = [tensor.name for tensor in graph.initializer]
        results = [info.name for info in graph.output]
        self.text(graph.name)
        for kind, names in (("inputs", inputs), ("initializers", held), ("outputs", results)):
            self.text(*names)
            if len(set(names)) < len(names) or "" in names:
                twice = next(n for n, k in Counter(names).items() if k > 1 or not n)
                raise OnwardError(f"{where} has {kind} of one name or none: {_quoted(twice)}")
        for info in (*graph.input, *graph.output):
            self.text(*(d.dim_param for d in info.type.tensor_type.shape.dim))
        for tensor in graph.initializer:
            check_tensor(tensor)
        self.nodes(graph.node, {*inputs, *held}, where, depth)

    def nodes(
        self, nodes: Iterable[onnx.NodeProto], known: set[str], where: str, depth: int
    ) -> None:
        for node in nodes:
            self.count += 1
            if self.count > NODES:
                raise OnwardError(f"it has more than {NODES} nodes")
            self.text(node.op_type, node.domain, node.name, *node.input, *node.output)
            for name in node.output:
                if name in known:
                    raise OnwardError(f"{where} makes {_quoted(name)} twice")
                if name:
                    known.add(name)
            place = one_line(f"{node.op_type} {node.name}".strip(), 80)
            names = [a.name for a in node.attribute]
            self.text(*names)
            if len(set(names)) < len(names):
                raise OnwardError(f"the node {place} has an attribute twice")
            for attribute in node.attribute:
                self.attribute(attribute, place, depth)

    def attribute(self, a: onnx.AttributeProto, place: str, depth: int) -> None:
        if a.ref_attr_name:
            return
        field = _FIELDS.get(a.type)
        given = {descriptor.name for descriptor, _ in a.ListFields()} & set(_FIELDS.values())
        # a number of 0 may be left out by writers that know no presence
        lacking = field in ("t", "g", "sparse_tensor", "tp") and field not in given
        if field is None or given - {field} or lacking:
            raise OnwardError(f"the node {place} has the attribute {_quoted(a.name)} of no kind")
        for tensor in [a.t] if field == "t" else a.tensors:
            check_tensor(tensor)
        for graph in [a.g] if field == "g" else a.graphs:
            self.graph(graph, depth + 1)

    def text(self, *names: object) -> None:
        for name in names:
            if not isinstance(name, str):
                raise OnwardError(f"it has the name {_quoted(name)}, which is not UTF-8")


def check_tensor(tensor: TensorProto) -> None:
    """Raises OnwardError for a tensor whose numbers are not those that its sizes ask for. The
    bytes of external ones are compared with their files elsewhere."""
    name = _quoted(tensor.name)
    count = count_of(tensor)
    typed = [f for f in _TYPED if len(getattr(tensor, f))]
    held = len(typed) + tensor.HasField("raw_data")
    external = tensor.data_location == TensorProto.EXTERNAL
    if tensor.HasField("segment"):
        raise OnwardError(f"the tensor {name} is a segment, which is not supported")
    if held > 1 or (external and held) or (tensor.external_data and not external):
        raise OnwardError(f"the tensor {name} has numbers in two places")
    if tensor.data_type == TensorProto.STRING:
        if external or len(tensor.string_data) != count:
            raise OnwardError(f"the tensor {name} has not the {count} strings that it claims")
        return
    need = bytes_of(tensor)
    if external:
        return
    if not typed:
        have = len(tensor.raw_data)
        if have != need:
            raise OnwardError(f"the tensor {name} has {have} bytes, and its sizes ask for {need}")
        return
    have = len(getattr(tensor, typed[0]))
    if have != _numbers(tensor, count, need):
        raise OnwardError(f"the tensor {name} has {have} numbers, and its sizes ask for {count}")
    wanted = onnx.helper.tensor_dtype_to_field(tensor.data_type)
    if typed[0] != wanted:
        raise OnwardError(f"the tensor {name} has its numbers in {typed[0]}, not in {wanted}")


def _numbers(tensor: TensorProto, count: int, need: int) -> int:
    """The entries of the typed field of a tensor."""
    if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return 2 * count
    return need if need < count else count  # several numbers in an entry


def _check_opsets(imports: Iterable[onnx.OperatorSetIdProto], where: str) -> None:
    seen: set[str] = set()
    for item in imports:
        domain = "" if item.domain in STANDARD else item.domain
        if domain in seen:
            raise OnwardError(f"{where} imports the opset of {_quoted(item.domain)} twice")
        seen.add(domain)
        newest = NEWEST if domain == "" else math.inf
        if not 1 <= item.version <= newest:
            raise OnwardError(
                f"{where} imports opset {item.version} of {_quoted(item.domain)}; onnx "
                f"{onnx.__version__} knows 1 to {newest}"
            )


def opset_of(model: onnx.ModelProto) -> int:
    """The opset of the standard's ops in a model."""
    return next((o.version for o in model.opset_import if o.domain in STANDARD), 1)


def _quoted(name: object) -> str:
    return one_line(repr(name), 80)


__all__ = ["NODES", "check_model", "check_tensor", "inner_tensors", "opset_of"]
