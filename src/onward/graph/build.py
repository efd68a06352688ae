"""Builder: writes nodes into a graph in the style of numpy. Nodes are made nowhere else.

    b = Builder(graph)
    y = b.Add(b.MatMul(x, w), bias)      # any ONNX or onward op by its name
    z = b.reshape(y, (B * T, 8))         # sizes may be ints or Dims

The output types of a node are inferred when it is made (the op's record in `graph/ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onward.graph.graph import (
    HANDED_ON,
    ONWARD,
    Graph,
    Node,
    Value,
    array_of,
    attributes,
    content_of,
    make_attributes,
    precision_said,
    type_of,
    where,
)
from onward.graph.ops import OPS
from onward.graph.ops.call import Call
from onward.graph.types import Dim, DType, Shape, Size, Type

ToValue = Value | int | float | bool | np.ndarray


class Builder:
    """Appends nodes to the graph, or inserts them before a node.

    module, backward (whether a node is in the backward half), precision (of the model's own
    autocast block) and marks (of HANDED_ON) are recorded on every node made.
    """

    def __init__(
        self,
        graph: Graph,
        before: Node | None = None,
        module: str = "",
        backward: bool = False,
        precision: str = "",
        marks: Mapping[str, Any] | None = None,
    ) -> None:
        self.graph = graph
        self.before = before
        self.module = module
        self.backward = backward
        self.precision = precision
        self.marks = dict(marks or {})

    @classmethod
    def at(cls, graph: Graph, node: Node, before: Node | None = None) -> Builder:
        """A Builder that inserts before `node`, or before `before`, and gives new nodes the module,
        half, precision and marks of `node`."""
        backward = bool(node.meta.get("backward"))
        said = precision_said(node)
        return cls(graph, before or node, where(node), backward, said, handed_on(node))

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)

        def make(*inputs: ToValue | None, **attrs: Any) -> Any:
            return self.node(op_type, inputs, attrs)

        return make

    def node(
        self, op_type: str, inputs: Sequence[ToValue | None], attrs: dict[str, Any]
    ) -> Value | tuple[Value, ...]:
        """Adds one node and returns its output, or a tuple where the op has several.

        Python numbers among the inputs become constants of the first floating input's type, or of
        the first input's type if none is floating. Raises ValueError for an unknown op.
        """
        values = self._values(inputs)
        attrs = {k: v for k, v in attrs.items() if v is not None}
        op = OPS.get(op_type)
        if op is None:
            raise ValueError(f"no record of the op {op_type}")
        call = Call(op_type, values, attrs)
        types = op.types(call)
        outputs = [Value(name=self.graph.fresh(op_type.lower())) for _ in types]
        for value, type in zip(outputs, types, strict=True):
            value.meta["type"] = type
        if call.content is not None:
            outputs[0].meta["content"] = call.content
        node = Node(
            "" if op.body is None else ONWARD,
            op_type,
            values,
            make_attributes(attrs),
            outputs=outputs,
            name=self.graph.fresh(op_type),
        )
        if self.module:
            node.metadata_props["module"] = self.module
        if self.precision:
            node.metadata_props["precision"] = self.precision
        if self.backward:
            node.meta["backward"] = True
        node.meta.update(self.marks)
        if self.before is None:
            self.graph.ir.append(node)
        else:
            self.graph.ir.insert_before(self.before, node)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def one(self, op_type: str, inputs: Sequence[ToValue | None], attrs: dict[str, Any]) -> Value:
        """Adds a node of an op with one output, and returns that."""
        y = self.node(op_type, inputs, attrs)
        assert isinstance(y, Value), f"{op_type} has several outputs where one was expected"
        return y

    def _values(self, inputs: Sequence[ToValue | None]) -> list[Value | None]:
        typed = [type_of(v) for v in inputs if isinstance(v, Value)]
        like = next((t for t in typed if t.is_floating), typed[0] if typed else None)
        out: list[Value | None] = []
        for v in inputs:
            if v is None or isinstance(v, Value):
                out.append(v)
            elif isinstance(v, np.ndarray):
                out.append(self.graph.constant(v))
            elif isinstance(v, bool):
                out.append(self.graph.constant(np.array(v)))
            else:
                assert like is not None, "a bare number needs a typed neighbour"
                out.append(self.scalar(v, like.dtype))
        return out

    # ---- constants

    def const(self, array: np.ndarray) -> Value:
        return self.graph.constant(array)

    def scalar(self, number: float, dtype: DType) -> Value:
        """A `dtype[]` constant."""
        return self.graph.constant(np.array(number, dtype=dtype.numpy()))

    def ints(self, numbers: Sequence[int]) -> Value:
        """An `i64[n]` constant."""
        return self.graph.constant(np.array(list(numbers), dtype=np.int64))

    # ---- sizes

    def size(self, size: Size) -> Value:
        """A size as `i64[1]`; a symbolic size is read from an input's shape at run time. Raises
        ValueError where no input has the symbol."""
        if not isinstance(size, Dim):
            return self.ints([size])
        whole = self.graph.symbol_source(str(size))
        if whole is not None:
            value, dim = whole
            return self.Shape(value, start=dim, end=dim + 1)
        total: Value | None = None
        for names, factor in size.terms:
            term: Value | None = None
            for name in names:
                source = self.graph.symbol_source(name) or self.graph.symbol_multiple(name)
                if source is None:
                    raise ValueError(f"no input has a dim of size {name}, so {size} has no source")
                value, dim = source
                one, have = self.Shape(value, start=dim, end=dim + 1), type_of(value).shape[dim]
                if str(have) != name and isinstance(have, Dim):
                    one = self.Div(one, self.ints([have.number({name: 1})]))
                term = one if term is None else self.Mul(term, one)
            if factor != 1 or term is None:
                f = self.ints([factor])
                term = f if term is None else self.Mul(term, f)
            total = term if total is None else self.Add(total, term)
        assert total is not None
        return total

    def sizes(self, shape: Sequence[Size]) -> Value:
        """A shape as `i64[n]`."""
        if all(isinstance(s, int) for s in shape):
            return self.ints([int(s) for s in shape])  # type: ignore[arg-type]
        return self.Concat(*[self.size(s) for s in shape], axis=0)

    def shape(self, x: Value) -> Value:
        """The shape of `x` as `i64[rank]`."""
        shape = type_of(x).shape
        if all(isinstance(s, int) for s in shape):
            return self.sizes(shape)
        return self.Shape(x)

    # ---- shorthands whose spelling in ONNX is longer

    def reshape(self, x: Value, shape: Shape) -> Value:
        """Reshapes x. One size may be -1: what is left. The shape is written with 0 (copy a dim)
        and one -1 where possible, so that no shape arithmetic is needed at run time. Raises
        ValueError for sizes that x does not have."""
        have = type_of(x).shape
        if -1 in shape and 0 not in shape:
            return self.Reshape(x, self.sizes(shape))
        if have == tuple(shape):
            return x
        if 0 in shape:  # in an empty tensor, -1 could be any number
            return self.Reshape(x, self.sizes(shape), allowzero=1)
        spelled: list[int] = []
        unknown = 0
        for i, size in enumerate(shape):
            if isinstance(size, int) and size != 0:
                spelled.append(size)
            elif i < len(have) and have[i] == size:
                spelled.append(0)
            else:
                spelled.append(-1)
                unknown += 1
        target = self.ints(spelled) if unknown <= 1 else self.sizes(shape)
        if unknown <= 1:
            y = self.node("Reshape", [x, target], {})
            assert isinstance(y, Value)
            y.meta["type"] = type_of(x).with_shape(shape)
            return y
        return self.Reshape(x, target)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        if list(perm) == list(range(len(perm))):
            return x
        return self.Transpose(x, perm=list(perm))

    def cast(self, x: Value, dtype: DType) -> Value:
        return x if type_of(x).dtype == dtype else self.Cast(x, to=dtype)

    def in_reverse(self, x: Value) -> Value:
        """Returns numbers in the reverse order of x. Integers become -1 - x in i64, since the
        lowest one has no negative and unsigned ones have none at all."""
        if type_of(x).is_floating:
            return self.Neg(x)
        return self.Sub(self.scalar(-1, DType.INT64), self.cast(x, DType.INT64))

    def reduce_sum(self, x: Value, dims: Sequence[int], keepdims: bool) -> Value:
        if not dims:
            return x  # ONNX reads an empty list of axes as all axes
        return self.ReduceSum(x, self.ints(dims), keepdims=int(keepdims))

    def unsqueeze(self, x: Value, dims: Sequence[int]) -> Value:
        return self.Unsqueeze(x, self.ints(dims))

    def squeeze(self, x: Value, dims: Sequence[int]) -> Value:
        return self.Squeeze(x, self.ints(dims))

    def expand(self, x: Value, shape: Shape) -> Value:
        return x if type_of(x).shape == tuple(shape) else self.Expand(x, self.sizes(shape))

    def slice(self, x: Value, dim: int, start: Size, end: Size) -> Value:
        """`x[..., start:end, ...]` with step 1."""
        return self.Slice(x, self.size(start), self.size(end), self.ints([dim]), self.ints([1]))

    def full(self, number: float, type: Type) -> Value:
        """A tensor of one number."""
        return self.expand(self.scalar(number, type.dtype), type.shape)

    def arange(self, size: Size) -> Value:
        """`0, 1, ..., size-1` as `i64[size]`."""
        if isinstance(size, int):
            return self.const(np.arange(size, dtype=np.int64))
        end = self.squeeze(self.size(size), [0])
        y: Value = self.Range(self.scalar(0, DType.INT64), end, self.scalar(1, DType.INT64))
        y.meta["type"] = Type(DType.INT64, (size,))
        return y


def handed_on(node: Node) -> dict[str, Any]:
    """The marks that nodes written at this one have as well."""
    return {mark: node.meta[mark] for mark in HANDED_ON if mark in node.meta}


def write_body(b: Builder, node: Node, inputs: Sequence[Value | None]) -> list[Value]:
    """Writes the body of an onward node, in standard ops on these inputs, and returns its results.

    If inputs have less precision than f32, a body that computes does so in f32: inputs are cast to
    f32, and results to the types of the node's outputs.
    """
    op, types = OPS[node.op_type], [type_of(y) for y in node.outputs]
    assert op.body is not None, f"{node.op_type} has no body"
    given = list(inputs)
    if not op.moves and any(
        t.is_low for t in (*types, *(type_of(x) for x in inputs if x is not None))
    ):
        wide = {x: b.cast(x, DType.FLOAT) for x in given if x is not None and type_of(x).is_low}
        given = [None if x is None else wide.get(x, x) for x in given]
        results = op.body(b, given, attributes(node))
        return [b.cast(y, t.dtype) for y, t in zip(results, types, strict=True)]
    return op.body(b, given, attributes(node))


def inline(graph: Graph, node: Node) -> None:
    """Replaces an onward node by its body."""
    results = write_body(Builder.at(graph, node), node, node.inputs)
    for old, new in zip(node.outputs, results, strict=True):
        graph.replace(old, new)
    graph.remove([node])


def settle_stops(graph: Graph) -> None:
    """Replaces each StopGradient by its input, in a graph that is differentiated already or never
    will be."""
    for node in list(graph):
        if node.op_type == "StopGradient":
            assert node.inputs[0] is not None
            graph.replace(node.outputs[0], node.inputs[0])
            graph.remove([node])


def is_zero(value: Value) -> bool:
    """Whether the value is a constant of zeros, possibly expanded."""
    array = array_of(value)
    if array is None:
        node = value.producer()
        if node is None or node.op_type != "Expand" or node.inputs[0] is None:
            return False
        array = array_of(node.inputs[0])
    return array is not None and not array.any()


__all__ = [
    "Builder",
    "ToValue",
    "content_of",
    "handed_on",
    "inline",
    "is_zero",
    "settle_stops",
    "write_body",
]
