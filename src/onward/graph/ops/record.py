"""Op: everything that is true of an op on every machine, for standard and own ops alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx_ir as ir

from onward.graph.graph import Node, attributes, type_of
from onward.graph.ops.call import Call
from onward.graph.types import Size, Type, product

Value = ir.Value
# A body is called with a `Builder`, whose module reads the table of records; importing it here
# would make a cycle.
Body: TypeAlias = "Callable[[Any, list[Value | None], dict[str, Any]], list[Value]]"
Infer: TypeAlias = Callable[[Call], "Type | list[Type]"]
Types: TypeAlias = "Sequence[Type | None]"
Count: TypeAlias = Callable[[Types, Types, Mapping[str, Any]], Size]
Axes: TypeAlias = Callable[[Node], "tuple[int, ...] | None"]


def no_arithmetic(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """`Op.flops` of ops other than matrix products: 0, since their time is that of moving bytes."""
    return 0


def all_bytes(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """`Op.moved` of ops that read or write every operand once."""
    total: Size = 0
    for t in (*inputs, *outputs):
        if t is not None:
            total = total + product(t.shape) * int(t.dtype.itemsize)
    return total


def no_axes(node: Node) -> tuple[int, ...]:
    """`Op.axes` of elementwise ops: none."""
    return ()


def unknown_axes(node: Node) -> None:
    """`Op.axes` of ops that move rows, or whose axes are not recorded."""
    return None


@dataclass(frozen=True)
class Op:
    """The record of one op.

    infer: returns the output types; raises ValueError where the inputs do not fit. body: writes an
    own op in standard ops, which is its meaning (see `build.write_body`: no input has less
    precision than f32; an absent optional input is None); None for ops of the ONNX standard. doc:
    of an own op; standard ops are documented on ONNX's operator pages, opset 23. cases: sample
    calls of an own op for the tests of all ops: attributes, and input types such as `"f32[2,3,8]"`.
    Traits. elementwise: an output element depends only on the input elements in its place, after
    broadcasting. view: strides can express it. reshapes: keeps elements and their order, changes
    the shape. reduces: sums its axes or the like. random: draws random numbers if its attribute
    `ratio`, if it has one, is above 0. moves: its body copies elements and so needs no f32. opaque:
    runs only in PyTorch, or only among ranks; its body raises. axes: the dims of the first input
    that it works along; along the others, rows stay rows in the same order; None: unknown.

    flops: two for each multiplication with its addition, of matrix products. moved: bytes read and
    written.
    """

    name: str
    infer: Infer
    body: Body | None = None
    doc: str = ""
    cases: tuple[tuple[dict[str, Any], tuple[str | None, ...]], ...] = ()
    elementwise: bool = False
    view: bool = False
    reshapes: bool = False
    reduces: bool = False
    random: bool = False
    moves: bool = False
    opaque: bool = False
    axes: Axes = unknown_axes
    flops: Count = no_arithmetic
    moved: Count = all_bytes

    def types(self, call: Call) -> list[Type]:
        """The types of a call's outputs, as `infer` returns them."""
        found = self.infer(call)
        return found if isinstance(found, list) else [found]


def standard(infer: Infer, *names: str, **traits: Any) -> tuple[Op, ...]:
    """Makes records for ops of the ONNX standard that share a type rule and traits."""
    if traits.get("elementwise"):
        traits.setdefault("axes", no_axes)
    return tuple(Op(name, infer, **traits) for name in names)


def axis_attribute(default: int) -> Axes:
    """`Op.axes` of an op that works along the dim in its attribute `axis`."""

    def axes(node: Node) -> tuple[int, ...]:
        return (int(attributes(node).get("axis", default)) % type_of(node.inputs[0]).rank,)

    return axes


__all__ = ["Axes", "Op", "Types", "axis_attribute", "no_axes", "standard"]
