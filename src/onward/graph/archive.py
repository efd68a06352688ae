"""Serializes a graph to bytes and back without loss, for the cache on disk and for a digest.

An ONNX file is meant for other engines: in it own ops are calls of functions, attributes have 32
bits, and roles and signature are lost but for names. These bytes hold the graph as the stages see
it: JSON, followed by the bytes of its constants. Reading runs no code and trusts nothing: invalid
bytes raise ArchiveError.

    bytes = length of the JSON (8 bytes, little endian), JSON, constants one after the other
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from onward.errors import one_line
from onward.graph.graph import MARKS, NOTES, Graph, Node, Role, Value, array_of
from onward.graph.signature import Hyperparameter, Signature, Slot
from onward.graph.types import Dim, DType, Size, Type

_HEAD = 8
_MOST_ALIKE = 1 << 24  # elements of a constant that is stored as one of them
_KEPT = (bool, int, str, Dim)  # types of values that a stage may store in a node's `meta`
_ATTRIBUTES = {
    ir.AttributeType.INT: ir.AttrInt64,
    ir.AttributeType.FLOAT: ir.AttrFloat32,
    ir.AttributeType.STRING: ir.AttrString,
    ir.AttributeType.INTS: ir.AttrInt64s,
    ir.AttributeType.FLOATS: ir.AttrFloat32s,
}
_KINDS = {kind.name: make for kind, make in _ATTRIBUTES.items()}


class ArchiveError(ValueError):
    """Raised for a graph that cannot be written, and for bytes that are not a graph."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, 400))


def to_bytes(graph: Graph) -> bytes:
    """Serializes a whole graph. Equal graphs give equal bytes, in other processes too.

    Raises ArchiveError for a graph with metadata that only this process can interpret.
    """
    return _Writer(graph).bytes()


def from_bytes(data: bytes) -> Graph:
    """Reads bytes written by `to_bytes`. Raises ArchiveError for other bytes."""
    try:
        length = int.from_bytes(data[:_HEAD], "little")
        text = json.loads(data[_HEAD : _HEAD + length].decode())
        graph = _Reader(text, data[_HEAD + length :]).graph
        if to_bytes(graph) != data:  # a name that stands twice, False where null belongs, ...
            raise ValueError("the graph that they give has other bytes")
        return graph
    except Exception as error:  # any, since a value of any type may stand anywhere
        raise ArchiveError(f"these bytes are not a saved graph: {error}") from error


def digest(graph: Graph) -> str:
    """SHA-256 of a graph's bytes (`to_bytes`)."""
    return hashlib.sha256(to_bytes(graph)).hexdigest()


def _cannot(what: str) -> NoReturn:
    raise ArchiveError(f"{what} cannot be written")


class _Writer:
    """Writes one graph. Values are numbered in order: inputs, constants, outputs of nodes. Types
    are numbered in order of appearance."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.numbers: dict[Value | None, int] = {None: -1}
        self.types: dict[Type, int] = {}
        self.blobs: list[bytes] = []

    def bytes(self) -> bytes:
        graph = self.graph
        made = {
            "name": graph.name,
            "count": graph.names_made,
            "counts": sorted(graph.counts),
            "inputs": [[*self._value(v), v.meta["role"].name] for v in graph.inputs],
            "constants": [self._constant(v) for v in graph.ir.initializers.values()],
            "nodes": [self._node(node) for node in graph],
            "outputs": [[name, self.numbers[v]] for name, v in graph.outputs.items()],
            "state": [[name, self.numbers[v]] for name, v in graph.state.items()],
            "signature": _signature(graph.signature),
        }
        made["types"] = [[t.dtype.name, [plain_size(n) for n in t.shape]] for t in self.types]
        text = json.dumps(made, separators=(",", ":")).encode()
        return b"".join((len(text).to_bytes(_HEAD, "little"), text, *self.blobs))

    def _value(self, value: Value) -> list[Any]:
        """Writes a value: its name, its type, and its known integers."""
        if value.meta.keys() - NOTES.keys():
            _cannot(f"the metadata of {value.name}")
        self.numbers[value] = len(self.numbers) - 1
        type = self.types.setdefault(value.meta["type"], len(self.types))
        content = None if value.const_value is not None else value.meta.get("content")
        return [value.name, type, None if content is None else [plain_size(n) for n in content]]

    def _constant(self, value: Value) -> list[Any]:
        array = array_of(value)
        if array is None or array.dtype.hasobject:
            _cannot(f"the constant {value.name}")
        flat = np.ascontiguousarray(array).reshape(-1)
        rows = flat.view(np.uint8).reshape(-1, array.itemsize)
        # equal rows are stored once, such as a table of zeros
        few = 1 < len(rows) <= _MOST_ALIKE
        alike = few and bool((rows == rows[0]).all())
        self.blobs.append((rows[:1] if alike else rows).tobytes())
        return [*self._value(value), list(array.shape), len(self.blobs[-1])]

    def _node(self, node: Node) -> list[Any]:
        if node.overload or node.version is not None or node.doc_string:
            _cannot(f"the node {node.name}")
        attributes: list[list[Any]] = []
        for item in node.attributes.values():
            if item.type not in _ATTRIBUTES or item.ref_attr_name is not None:
                _cannot(f"the attribute {item.name} of {node.op_type}")
            value = list(item.value) if isinstance(item.value, tuple) else item.value
            attributes.append([item.name, item.type.name, value])
        marks: dict[str, Any] = dict(node.meta)
        for name, mark in marks.items():
            if name not in MARKS or not isinstance(mark, _KEPT):
                _cannot(f"{name} of {node.op_type}")
        return [
            node.domain,
            node.op_type,
            node.name,
            [self.numbers[v] for v in node.inputs],
            attributes,
            dict(node.metadata_props),
            {name: plain_size(m) if isinstance(m, Dim) else m for name, m in marks.items()},
            [self._value(v) for v in node.outputs],
        ]


class _Reader:
    def __init__(self, text: dict[str, Any], blob: bytes) -> None:
        names, counts = [text["name"]], list[object](text["counts"])
        if counts != text["counts"] or not all(isinstance(x, str) for x in names + counts):
            raise TypeError("a name that is no text")
        self.graph = graph = Graph(text["name"])
        self.values: list[Value | None] = []
        self.types = [Type(DType[t], tuple(map(size_of, shape))) for t, shape in text["types"]]
        for *value, role in text["inputs"]:
            made = self._value(value)
            made.meta["role"] = Role[role]
            graph.ir.inputs.append(made)
        start = 0
        for name, type, _, shape, nbytes in text["constants"]:
            part = np.frombuffer(blob[start : start + nbytes], self._type(type).dtype.numpy())
            alike = part.size == 1 and 0 not in shape
            if alike and not 0 < math.prod(shape) <= _MOST_ALIKE:
                _cannot(f"{name} of {shape}")
            array = np.array(np.broadcast_to(part[0], shape) if alike else part.reshape(shape))
            made = self._value([name, type, None], ir.tensor(array, name=name))
            graph.ir.register_initializer(made)
            start += nbytes
        if start != len(blob):
            _cannot("a rest")
        graph.settle(int(text["count"]))
        for node in text["nodes"]:
            graph.ir.append(self._node(*node))
        graph.outputs = {name: self._at(i) for name, i in text["outputs"]}
        graph.state = {name: self._at(i) for name, i in text["state"]}
        graph.counts = set(text["counts"])
        graph.signature = _signed(text["signature"])

    def _value(self, fields: list[Any], array: Any = None) -> Value:
        name, type, content = fields
        if not isinstance(name, str):  # the IR would choose one
            raise TypeError("a value without a name")
        value = Value(name=name, const_value=array)
        value.meta["type"] = self._type(type)
        if content is not None:
            value.meta["content"] = tuple(size_of(n) for n in content)
        self.values.append(value)
        return value

    def _type(self, number: int) -> Type:
        if number < 0:
            raise LookupError(f"no type {number}")
        return self.types[number]

    def _at(self, number: int) -> Value:
        value = self.values[number]
        if number < 0 or value is None:
            raise LookupError(f"no value {number}")
        return value

    def _node(
        self,
        domain: str,
        op: str,
        name: str,
        inputs: list[int],
        attributes: list[list[Any]],
        properties: dict[str, str],
        marks: dict[str, Any],
        outputs: list[list[Any]],
    ) -> Node:
        given = [None if i == -1 else self._at(i) for i in inputs]
        if not all(isinstance(x, str) for pair in properties.items() for x in pair):
            raise TypeError(f"properties of {op} that are no texts")
        node = Node(
            domain,
            op,
            given,
            [_KINDS[kind](n, value) for n, kind, value in attributes],
            outputs=[self._value(v) for v in outputs],
            name=name,
            metadata_props=properties,
        )
        held = {n: size_of(m) if isinstance(m, list) else m for n, m in marks.items()}
        if not held.keys() <= MARKS.keys() or not all(isinstance(m, _KEPT) for m in held.values()):
            raise LookupError(f"marks of {op} that no node has")
        node.meta.update(held)
        return node


# ---- sizes: a number, or the terms of a polynomial


def plain_size(size: Size) -> Any:
    """A size as JSON. Raises ArchiveError for a size with a settled number."""
    if not isinstance(size, Dim):
        return int(size)
    if size.at is not None:
        _cannot(f"the settled size {size}")
    return [[list(names), factor] for names, factor in size.terms]


def size_of(size: Any) -> Size:
    """Reads a size written by `plain_size`. Raises TypeError for other values."""
    if type(size) is int:
        return size
    terms = tuple((tuple(names), factor) for names, factor in size)
    if not all(type(n) is int and all(isinstance(x, str) for x in names) for names, n in terms):
        raise TypeError(f"{size} is no size")
    return Dim(terms)


# ---- signatures: keys that are not strings are written as lists


def _signature(signature: Signature) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, entry in vars(signature).items():
        if isinstance(entry, Mapping):
            made[name] = {"pairs": [[_key(k), v] for k, v in entry.items()]}
        else:
            made[name] = entry
    return made


def _key(key: Any) -> Any:
    if isinstance(key, Hyperparameter):
        return ["hyperparameter", key.group, key.name]
    return ["slot", key.parameter, key.name] if isinstance(key, Slot) else key


def _signed(entries: Mapping[str, Any]) -> Signature:
    made: dict[str, Any] = {}
    for name, entry in entries.items():
        pairs = entry["pairs"] if isinstance(entry, dict) else None
        made[name] = entry if pairs is None else {_keyed(k): v for k, v in pairs}
    return Signature(**made)


def _keyed(key: Any) -> Any:
    if not isinstance(key, list):
        return key
    kind, first, name = key
    return Hyperparameter(first, name) if kind == "hyperparameter" else Slot(first, name)


__all__ = ["ArchiveError", "digest", "from_bytes", "plain_size", "size_of", "to_bytes"]
