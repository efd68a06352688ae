"""Graph: a pure, typed, topologically ordered program of ONNX nodes; a thin layer over `onnx_ir`.

`onnx_ir` provides nodes, use-def chains, edits during iteration and serialization. This layer adds
a `Type` to every value, a `Role` to every input, outputs by name, state pairs (which output is the
next value of which input), and known integers in shape vectors. It knows neither torch nor a
device.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onward.graph.names import distinct
from onward.graph.signature import Signature
from onward.graph.types import Dim, DType, Size, Type, of_array, substitute

Value = ir.Value
Node = ir.Node

OPSET = 23
IR_VERSION = 10
ONWARD = "onward"  # the domain of ops that the ONNX standard lacks

# Keys of `node.meta`, each with its use. Losing one changes no result: the meaning of a node is in
# its op, inputs, attributes and types.
MARKS = {
    "backward": "whether a node is in the backward half: for launch order and reports of bytes; "
    "what waits for a cotangent follows from inputs",
    "again": "whether a node is recomputed to save memory: for launch order",
    "stage": "the stage of a pipeline that a node belongs to, until ranks have graphs of their own",
    "action": "the number of the action of a pipeline that a node is part of: for launch order",
    "sequences": "the number of sequences among packed rows: for counts of FLOPs",
    "unfused": "why no attention was found here: for a message",
}
# Marks that nodes written at another one, or derived from it, have as well.
HANDED_ON = ("stage", "action")
# Keys of `value.meta`. Only `type` is part of the meaning; `check` requires it of every value.
NOTES = {
    "type": "a value without one is refused",
    "role": "an input without one is refused",
    "content": "known integers; without this they are computed at run time",
}


class Role(enum.Enum):
    """Why a graph input exists, which decides who owns its memory."""

    PARAM = "param"  # the user's parameter; the session never copies it
    BUFFER = "buffer"  # a non-trained tensor of the user's module
    BATCH = "batch"  # one leaf of the batch
    RANDOM = "random"  # the step's seed words and the batch's first sample index
    HYPER = "hyper"  # learning rates, step count: scalars set before each step
    COTANGENT = "cotangent"  # the weight of an output in the gradients, of the output's type
    STATE = "state"  # optimizer state and gradient accumulators, kept between steps
    SIZE = "size"  # integers that follow from the sizes of a batch; their content is known


def type_of(value: Value | None) -> Type:
    """The value's type, which every value of a Builder or of Graph.input has."""
    assert value is not None, "an absent optional input has no type"
    return value.meta["type"]


def role_of(value: Value) -> Role | None:
    return value.meta.get("role")


def content_of(value: Value | None) -> tuple[Size, ...] | None:
    """The integers in a shape vector (`i64[n]` or `i64[]`), if they are known; else None."""
    if value is None:
        return None
    known = value.meta.get("content")
    if known is None and value.const_value is not None:
        array = value.const_value.numpy()
        if array.dtype == np.int64 and array.size <= 64 and array.ndim <= 1:
            known = value.meta["content"] = tuple(int(n) for n in array.reshape(-1))
    return known


def array_of(value: Value | None) -> np.ndarray | None:
    """The array of a constant; None where the value is computed."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def needed(graph: Graph, outputs: Iterable[str]) -> set[Node]:
    """The nodes that these outputs depend on."""
    stack = [graph.outputs[name].producer() for name in outputs]
    found: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [x.producer() for x in node.inputs if x is not None]
    return found


def attributes(node: Node) -> dict[str, Any]:
    """The node's attributes as plain Python values."""
    return {a.name: _plain(a.value) for a in node.attributes.values()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def make_attributes(values: Mapping[str, Any]) -> list[ir.Attr]:
    """Converts Python values to ONNX attributes; None omits an attribute."""
    out: list[ir.Attr] = []
    for name, value in values.items():
        match value:
            case None:
                continue
            case bool() | int():
                out.append(ir.AttrInt64(name, int(value)))
            case float():
                out.append(ir.AttrFloat32(name, value))
            case str():
                out.append(ir.AttrString(name, value))
            case list() | tuple() if all(isinstance(v, int) for v in value):
                out.append(ir.AttrInt64s(name, list(value)))
            case list() | tuple() if all(isinstance(v, float) for v in value):
                out.append(ir.AttrFloat32s(name, list(value)))
            case ir.DataType():
                out.append(ir.AttrInt64(name, int(value)))
            case _:
                raise TypeError(f"attribute {name}={value!r} has no ONNX form")
    return out


def where(node: Node) -> str:
    """The module path of a node, for messages: `transformer.h.0.attn`."""
    return node.metadata_props.get("module", "")


def precision_said(node: Node) -> str:
    """The name of the type that the model's own autocast block gives to the products of a node: f32
    where the block turns autocast off; "" outside of such blocks."""
    return node.metadata_props.get("precision", "")


def precisions_said(graph: Graph) -> set[str]:
    """The types below f32 that the model's own autocast blocks ask for."""
    return {precision_said(node) for node in graph} - {"", DType.FLOAT.name}


class Inputs(NamedTuple):
    """An index of a graph's inputs by name, since there are thousands, mostly parameters and
    state."""

    number: int
    last: Value | None
    named: dict[str | None, Value]
    sized: list[Value]  # inputs with a symbolic dim

    @classmethod
    def of(cls, values: Sequence[Value]) -> Inputs:
        sized = [v for v in values if not all(isinstance(n, int) for n in type_of(v).shape)]
        return cls(len(values), values[-1] if values else None, {v.name: v for v in values}, sized)


class Graph:
    """A program. outputs: values by name. state: for an output's name, the input that it updates.
    signature: what inputs and outputs mean. After capture a graph is `loss = f(params, batch)`,
    after differentiation `state', loss = step(state, batch)`."""

    def __init__(self, name: str = "graph") -> None:
        self.ir = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, ONWARD: 1}, name=name)
        self.outputs: dict[str, Value] = {}
        self.state: dict[str, Value] = {}
        self.signature = Signature()
        self.counts: set[str] = set()  # names of sizes that are counted for each batch
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self._count = 0
        self._taken: set[str] = set()  # names of inputs so far
        self._inputs = Inputs.of([])

    # ---- making

    @property
    def name(self) -> str:
        return self.ir.name or "graph"

    @property
    def inputs(self) -> list[Value]:
        return list(self.ir.inputs)

    def input(self, name: str, type: Type, role: Role) -> Value:
        """Adds an input. A name that is taken is changed: read it from `value.name`."""
        name = distinct(name, self._taken)
        self._taken.add(name)
        value = Value(name=name)
        value.meta["type"] = type
        value.meta["role"] = role
        self.ir.inputs.append(value)
        return value

    def output(self, name: str, value: Value, source: Value | None = None) -> str:
        """Adds an output; source: the input that it is the next value of. Returns the output's
        name, which is changed where it was taken."""
        name = distinct(name, self.outputs)
        self.outputs[name] = value
        if source is not None:
            self.state[name] = source
        return name

    def inputs_with(self, *roles: Role) -> list[Value]:
        return [v for v in self.ir.inputs if role_of(v) in roles]

    def find_input(self, name: str) -> Value:
        value = self._found().named.get(name)
        if value is None or value.name != name:  # the input was renamed
            value = next(v for v in self.ir.inputs if v.name == name)
        return value

    def constant(self, array: np.ndarray) -> Value:
        """Adds a constant; arrays equal in bits, shape and dtype share one value."""
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        key = (array.dtype.str, array.shape, array.tobytes())
        value = self._constants.get(key)
        if value is None or value.name not in self.ir.initializers:
            name = self.fresh("const")
            value = Value(name=name, const_value=ir.tensor(array, name=name))
            value.meta["type"] = of_array(array)
            self.ir.register_initializer(value)
            self._constants[key] = value
        return value

    def fresh(self, stem: str) -> str:
        """Makes a new name of a value or node; names are made nowhere else."""
        self._count += 1
        return f"{stem}_{self._count}"

    @property
    def names_made(self) -> int:
        """The number of names made by `fresh`."""
        return self._count

    def settle(self, names_made: int) -> None:
        """Indexes a copy's inputs by name and its constants by bits, after all have been added."""
        self._count = names_made
        self._taken = {v.name or "" for v in self.ir.inputs}
        for value in self.ir.initializers.values():
            array = array_of(value)
            assert array is not None
            self._constants[(array.dtype.str, array.shape, array.tobytes())] = value

    # ---- reading

    def __iter__(self) -> Iterator[Node]:
        return iter(self.ir)

    def __reversed__(self) -> Iterator[Node]:
        return reversed(self.ir)

    def __len__(self) -> int:
        return len(self.ir)

    def output_values(self) -> set[Value]:
        return set(self.outputs.values())

    def symbol_source(self, name: str) -> tuple[Value, int] | None:
        """A value and a dim of it whose size is exactly `name` (`"B"`, or `"B*T"`): an input, or
        counted rows."""
        counted = self._counted() if name in self.counts else ()
        for value in itertools.chain(self._found().sized, counted):
            for i, size in enumerate(type_of(value).shape):
                if not isinstance(size, int) and str(size) == name:
                    return value, i
        return None

    def symbol_multiple(self, name: str) -> tuple[Value, int] | None:
        """An input and a dim of it whose size is a multiple of `name`, such as `8*T`."""
        for value in self._found().sized:
            for i, size in enumerate(type_of(value).shape):
                if isinstance(size, Dim) and [names for names, _ in size.terms] == [(name,)]:
                    return value, i
        return None

    def _found(self) -> Inputs:
        """The index of inputs, rebuilt after changes. Inputs are only appended or removed, so their
        number and the last one tell whether there were any."""
        inputs = self.ir.inputs
        last = inputs[-1] if inputs else None
        if self._inputs.number != len(inputs) or self._inputs.last is not last:
            self._inputs = Inputs.of(inputs)
        return self._inputs

    def _counted(self) -> Iterator[Value]:
        """The lists of row indices whose lengths depend on the batch."""
        return (node.outputs[0] for node in self.ir if node.op_type == "Rows")

    @property
    def symbols(self) -> list[str]:
        """Names of symbolic sizes, in order of first appearance."""
        seen: dict[str, None] = {}
        for value in self._found().sized:
            for size in type_of(value).shape:
                if not isinstance(size, int):
                    seen.update(dict.fromkeys(sorted(size.symbols)))
        return list(seen)

    # ---- editing

    def replace(self, old: Value, new: Value) -> None:
        """Replaces every use of `old`, including outputs, by `new`."""
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if old in self.outputs.values():
            self.outputs.update({name: new for name, v in self.outputs.items() if v is old})

    def remove(self, nodes: Iterable[Node]) -> None:
        """Removes nodes whose outputs are no longer used."""
        self.ir.remove(list(nodes), safe=True)

    def sweep(self) -> int:
        """Removes nodes and constants without readers; returns the number of nodes."""
        kept = self.output_values()
        edits = 0
        for node in reversed(list(self)):
            if any(v in kept or v.uses() for v in node.outputs):
                continue
            self.remove([node])
            edits += 1
        for name, value in list(self.ir.initializers.items()):
            if value not in kept and not value.uses():
                del self.ir.initializers[name]
        return edits

    def clone(self, dims: Mapping[str, Size] | None = None) -> Graph:
        """A copy that shares no nodes or values. dims: sizes to substitute for symbols."""
        sizes = dims or {}
        out = Graph(self.name)
        out.counts = set(self.counts)
        out.signature = self.signature
        copies: dict[Value, Value] = {}

        def copied(value: Value, into: Value) -> Value:
            into.meta.update(value.meta)
            if sizes:
                into.meta["type"] = type_of(value).specialized(sizes)
                content = value.meta.get("content")
                if content is not None:
                    into.meta["content"] = tuple(substitute(n, sizes) for n in content)
            copies[value] = into
            return into

        for value in self.ir.inputs:
            out.ir.inputs.append(copied(value, Value(name=value.name)))
        for value in self.ir.initializers.values():
            twin = copied(value, Value(name=value.name, const_value=value.const_value))
            out.ir.register_initializer(twin)
        out.settle(self._count)
        for node in self.ir:
            twin_outputs = [copied(v, Value(name=v.name)) for v in node.outputs]
            twin = Node(
                node.domain,
                node.op_type,
                [None if v is None else copies[v] for v in node.inputs],
                list(node.attributes.values()),
                outputs=twin_outputs,
                name=node.name,
                metadata_props=dict(node.metadata_props),
            )
            twin.meta.update(node.meta)
            out.ir.append(twin)
        out.outputs = {name: copies[v] for name, v in self.outputs.items()}
        out.state = {name: copies[v] for name, v in self.state.items()}
        return out
