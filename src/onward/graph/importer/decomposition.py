"""Decompositions: ops of the ONNX standard, written in ops that a graph may hold.

Each is a function `(call: NodeCall) -> results`, registered with `decomposition`. What it builds is
typed, differentiated and run like anything else, so that an op with a decomposition needs no
record, rule or kernel. An op that ONNX defines by a function body needs no decomposition either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from onward.errors import shown
from onward.graph.build import Builder
from onward.graph.graph import array_of, content_of, type_of
from onward.graph.registry import enter
from onward.graph.types import DType, Shape, Size, Type

Value = ir.Value
Results: TypeAlias = "Value | Sequence[Value | None]"
Subgraph: TypeAlias = "Callable[[onnx.GraphProto, Sequence[Value | None]], list[Value]]"
Decomposition: TypeAlias = "Callable[[NodeCall], Results]"
DECOMPOSITIONS: dict[str, Decomposition] = {}
LARGEST = 1 << 24  # most elements of a constant that is made of numbers in a model
STEPS = 4096  # most times that nodes are repeated for one


@dataclass(frozen=True)
class NodeCall:
    """One node of a model that is being read.

    given: its attributes; `attr` adds the schema's defaults. schema: None for an op that the
    standard lacks. subgraph: makes the nodes of an attribute that is a graph, given the values of
    the graph's inputs. dropped: `(x, ratio) -> y`, dropout at a site of its own; None where a graph
    may not draw. room: raises ValueError where so many more nodes are too many.
    """

    b: Builder
    op_type: str
    inputs: list[Value | None]
    given: dict[str, Any]
    schema: onnx.defs.OpSchema | None
    outputs: int
    subgraph: Subgraph
    dropped: Callable[[Value, float], Value] | None = None
    room: Callable[[int], None] = lambda nodes: None

    def attr(self, name: str, default: Any = None) -> Any:
        if name in self.given:
            return self.given[name]
        known = None if self.schema is None else self.schema.attributes.get(name)
        value = None if known is None else known.default_value
        if value is None or not value.type:
            return default
        return plain(onnx.helper.get_attribute_value(value))

    def present(self, i: int) -> bool:
        return i < len(self.inputs) and self.inputs[i] is not None

    def x(self, i: int = 0) -> Value:
        value = self.inputs[i] if i < len(self.inputs) else None
        if value is None:
            raise ValueError(f"{self.op_type} lacks its input {i}")
        return value

    def optional(self, i: int) -> Value | None:
        return self.inputs[i] if i < len(self.inputs) else None

    def type(self, i: int = 0) -> Type:
        return type_of(self.x(i))

    def shape(self, i: int = 0) -> Shape:
        return self.type(i).shape

    def rank(self, i: int = 0) -> int:
        return self.type(i).rank

    def sizes(self, i: int = 0) -> list[int]:
        """The sizes of an input as numbers. Raises ValueError where one is symbolic."""
        shape = self.shape(i)
        if not all(isinstance(n, int) for n in shape):
            raise ValueError(f"{self.op_type} over {self.type(i)} needs fixed sizes")
        return [int(n) for n in shape]  # type: ignore[arg-type]

    def axis(self, default: int = 0, i: int = 0) -> int:
        given = self.attr("axis", default)
        return int(given) % max(self.rank(i), 1)

    def array(self, i: int) -> np.ndarray:
        """The content of a constant input. Raises ValueError for other inputs."""
        found = array_of(self.x(i))
        if found is not None:
            return found
        content = content_of(self.x(i))
        if content is not None and all(isinstance(n, int) for n in content):
            return np.array(content, dtype=np.int64).reshape(self.sizes(i))
        raise ValueError(f"{self.op_type} needs a constant as its input {i}")

    def ints(self, i: int) -> list[int]:
        return [int(n) for n in self.array(i).reshape(-1)]

    def contents(self, i: int) -> tuple[Size, ...]:
        """The integers of a shape vector, some of which may be symbolic."""
        content = content_of(self.x(i))
        return tuple(self.ints(i)) if content is None else content

    def plain_node(self, *inputs: Any, op: str = "", **attrs: Any) -> Any:
        """Adds the node itself, with other inputs or attributes."""
        given = {**self.given, **attrs}
        return self.b.node(op or self.op_type, inputs or self.inputs, given)


def plain(value: Any) -> Any:
    """Converts an attribute to a plain Python value."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, onnx.TensorProto):
        return tensor_array(value)
    if isinstance(value, onnx.GraphProto | onnx.SparseTensorProto | onnx.TypeProto):
        return value
    if isinstance(value, list | tuple) or (
        hasattr(value, "__len__") and not isinstance(value, str)
    ):
        return [plain(v) for v in value]
    return value


def said_of(error: Exception) -> str:
    """What an error of reading says, for a message."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error) if isinstance(error, ValueError) else repr(error)


def tensor_array(tensor: onnx.TensorProto) -> np.ndarray:
    """The numbers of a tensor in a model. Raises ValueError for one that names another file."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ValueError(
            f"the numbers of tensor {shown(tensor.name)} lie in another file; fix: "
            "onnx.load(path), which reads them too"
        )
    return onnx.numpy_helper.to_array(tensor)


def require_few(count: Size) -> None:
    """Raises ValueError for a constant of more elements than a size in a model may ask for."""
    if isinstance(count, int) and count > LARGEST:
        raise ValueError(f"it makes a constant of {count} elements, more than {LARGEST}")


def require_steps(count: Size) -> None:
    """Raises ValueError for nodes that are repeated more often than `STEPS`."""
    if isinstance(count, int) and count > STEPS:
        raise ValueError(f"its nodes would be repeated {count} times, more than {STEPS}")


def decomposition(*op_types: str) -> Callable[[Decomposition], Decomposition]:
    def decorate(function: Decomposition) -> Decomposition:
        for op_type in op_types:
            enter(DECOMPOSITIONS, "decomposition of", op_type, function)
        return function

    return decorate


def numeric(dtype: DType) -> np.dtype[Any]:
    return np.dtype(dtype.numpy())


__all__ = [
    "DECOMPOSITIONS",
    "Decomposition",
    "NodeCall",
    "decomposition",
    "numeric",
    "plain",
    "require_few",
    "require_steps",
    "said_of",
    "tensor_array",
]
