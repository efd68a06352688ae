"""Graph: a pure, typed, topologically ordered program of ONNX nodes; a thin face over `onnx_ir`.

What `onnx_ir` gives: nodes, use-def chains, safe edits while iterating, serialisation.
What this face adds: a `Type` on every value, a `Role` on every input, outputs by name, the
state pairs (which output is the next value of which input), and known integer contents of
shape vectors. Nothing here knows torch or a device.
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
ONWARD = "onward"  # the domain of the ops that the standard lacks

# What `node.meta` may hold, and why no number changes where it is lost: what a node means stands in
# its op, inputs, attributes and types, which whoever makes a node has to give.
MARKS = {
    "backward": "in which half of a step a node was written: an order and a report of bytes; what "
    "waits for a cotangent shows by its inputs",
    "again": "made a second time to save memory: where it stands in the order",
    "sequences": "how many sequences packed rows are of: counts of FLOPs",
    "unfused": "why no attention was found here: a message",
}
# What `value.meta` may hold; only `type` carries meaning, and `check` asks it of every value.
NOTES = {
    "type": "a value without one is refused",
    "role": "an input without one is refused",
    "content": "the integers that are known beforehand: without them they are computed",
}


class Role(enum.Enum):
    """Why a graph input exists, hence who owns its memory."""

    PARAM = "param"  # the user's parameter; the session never copies it
    BUFFER = "buffer"  # a non-trained tensor of the user's module
    BATCH = "batch"  # one leaf of the batch
    RANDOM = "random"  # the step's seed words and the batch's first sample index
    HYPER = "hyper"  # learning rates, step count: scalars set before each step
    COTANGENT = "cotangent"  # what an output weighs in the gradients, of its own type
    STATE = "state"  # optimizer state and gradient accumulators, kept between steps
    SIZE = "size"  # integers that follow from the sizes of a batch; their content is known


def type_of(value: Value | None) -> Type:
    """The value's type. Every value made by a Builder or Graph.input has one."""
    assert value is not None, "an absent optional input has no type"
    return value.meta["type"]


def role_of(value: Value) -> Role | None:
    return value.meta.get("role")


def content_of(value: Value | None) -> tuple[Size, ...] | None:
    """The integers a shape-like value (`i64[n]` or `i64[]`) holds, where they are known."""
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
    """The nodes that compute these outputs, directly or not."""
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
    """Makes ONNX attributes of Python values; None means absent."""
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
    """The module path a node came from, for messages: `transformer.h.0.attn`."""
    return node.metadata_props.get("module", "")


def precision_said(node: Node) -> str:
    """The type, by name, that the model's own autocast block gives an op's products: f32 where the
    block switches autocast off, empty outside of such a block."""
    return node.metadata_props.get("precision", "")


def precisions_said(graph: Graph) -> set[str]:
    """The types below f32 that the model's own autocast blocks ask for."""
    return {precision_said(node) for node in graph} - {"", DType.FLOAT.name}


class Inputs(NamedTuple):
    """An index of a graph's inputs by name: there are thousands, most of them parameters and
    state."""

    number: int
    last: Value | None
    named: dict[str | None, Value]
    sized: list[Value]  # those with a dim that is not fixed

    @classmethod
    def of(cls, values: Sequence[Value]) -> Inputs:
        sized = [v for v in values if not all(isinstance(n, int) for n in type_of(v).shape)]
        return cls(len(values), values[-1] if values else None, {v.name: v for v in values}, sized)


class Graph:
    """A program. `outputs` maps names to values, `state` output names to the inputs they update;
    `signature` says what inputs and outputs mean.

    Example (text form): `loss = f(params, batch)` after capture, `state', loss = step(state,
    batch)` after differentiate.
    """

    def __init__(self, name: str = "graph") -> None:
        self.ir = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, ONWARD: 1}, name=name)
        self.outputs: dict[str, Value] = {}
        self.state: dict[str, Value] = {}
        self.signature = Signature()
        self.counts: set[str] = set()  # names of sizes that are counted in the batch
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self._count = 0
        self._taken: set[str] = set()  # names of inputs
        self._inputs = Inputs.of([])

    # ---- making

    @property
    def name(self) -> str:
        return self.ir.name or "graph"

    @property
    def inputs(self) -> list[Value]:
        return list(self.ir.inputs)

    def input(self, name: str, type: Type, role: Role) -> Value:
        """Adds an input. Where the name is taken it gets another: `value.name` is the one."""
        name = distinct(name, self._taken)
        self._taken.add(name)
        value = Value(name=name)
        value.meta["type"] = type
        value.meta["role"] = role
        self.ir.inputs.append(value)
        return value

    def output(self, name: str, value: Value, source: Value | None = None) -> str:
        """Adds an output, the next value of the input `source` where there is one. Where the name
        is taken it gets another, which is returned."""
        name = distinct(name, self.outputs)
        self.outputs[name] = value
        if source is not None:
            self.state[name] = source
        return name

    def inputs_with(self, *roles: Role) -> list[Value]:
        return [v for v in self.ir.inputs if role_of(v) in roles]

    def find_input(self, name: str) -> Value:
        value = self._found().named.get(name)
        if value is None or value.name != name:  # it was renamed
            value = next(v for v in self.ir.inputs if v.name == name)
        return value

    def constant(self, array: np.ndarray) -> Value:
        """The constant's value; equal arrays (bits, shape and dtype) share one."""
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
        """A new name. Names are made here and nowhere else."""
        self._count += 1
        return f"{stem}_{self._count}"

    @property
    def names_made(self) -> int:
        """The number of names that `fresh` has made."""
        return self._count

    def settle(self, names_made: int) -> None:
        """Indexes a copy's inputs by name and its constants by bits, once all of them are there."""
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
        """A value and the dim of it whose size prints as `name` (`"B"`, or `"B*T"`): an input, or
        rows that are counted."""
        counted = self._counted() if name in self.counts else ()
        for value in itertools.chain(self._found().sized, counted):
            for i, size in enumerate(type_of(value).shape):
                if not isinstance(size, int) and str(size) == name:
                    return value, i
        return None

    def symbol_multiple(self, name: str) -> tuple[Value, int] | None:
        """An input and the dim of it whose size is a multiple of `name`, such as `8*T`."""
        for value in self._found().sized:
            for i, size in enumerate(type_of(value).shape):
                if isinstance(size, Dim) and [names for names, _ in size.terms] == [(name,)]:
                    return value, i
        return None

    def _found(self) -> Inputs:
        """The index of inputs, made again after a change: inputs are only appended or removed, so
        that their count and the last one show it."""
        inputs = self.ir.inputs
        last = inputs[-1] if inputs else None
        if self._inputs.number != len(inputs) or self._inputs.last is not last:
            self._inputs = Inputs.of(inputs)
        return self._inputs

    def _counted(self) -> Iterator[Value]:
        """The lists of rows whose lengths the batch decides."""
        return (node.outputs[0] for node in self.ir if node.op_type == "Rows")

    @property
    def symbols(self) -> list[str]:
        """Names of the sizes that are not fixed, in order of first appearance."""
        seen: dict[str, None] = {}
        for value in self._found().sized:
            for size in type_of(value).shape:
                if not isinstance(size, int):
                    seen.update(dict.fromkeys(sorted(size.symbols)))
        return list(seen)

    # ---- editing

    def replace(self, old: Value, new: Value) -> None:
        """Every use of `old`, outputs too, becomes `new`."""
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        if old in self.outputs.values():
            self.outputs.update({name: new for name, v in self.outputs.items() if v is old})

    def remove(self, nodes: Iterable[Node]) -> None:
        """Removes nodes whose outputs nobody uses any more."""
        self.ir.remove(list(nodes), safe=True)

    def sweep(self) -> int:
        """Removes nodes that nobody reads, whose number it returns, and constants left without a
        reader."""
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
        """A copy that shares no node or value. With `dims`, sizes are substituted on the way."""
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
