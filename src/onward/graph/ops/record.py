"""Op: everything that is true of an op on every machine, standard and own ops alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx_ir as ir

from onward.graph.graph import Node, attributes, type_of
from onward.graph.ops.call import Call
from onward.graph.types import Size, Type, product

Value = ir.Value
# Called with a `Builder`. That class reads the table of records, so that naming it here would make
# a ring of imports.
Body: TypeAlias = "Callable[[Any, list[Value | None], dict[str, Any]], list[Value]]"
Infer: TypeAlias = Callable[[Call], "Type | list[Type]"]
Types: TypeAlias = "Sequence[Type | None]"
Count: TypeAlias = Callable[[Types, Types, Mapping[str, Any]], Size]
Axes: TypeAlias = Callable[[Node], "tuple[int, ...] | None"]


def no_arithmetic(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """`Op.flops` of all but matrix products: their time is the bytes that they move."""
    return 0


def all_bytes(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """`Op.moved` where every operand is read or written once."""
    total: Size = 0
    for t in (*inputs, *outputs):
        if t is not None:
            total = total + product(t.shape) * int(t.dtype.itemsize)
    return total


def no_axes(node: Node) -> tuple[int, ...]:
    """`Op.axes` of ops that work on each element by itself."""
    return ()


def unknown_axes(node: Node) -> None:
    """`Op.axes` of an op that moves rows, or whose axes are not recorded."""
    return None


@dataclass(frozen=True)
class Op:
    """The record of one op.

    infer: the output types; raises ValueError where the inputs do not fit. body: an own op in
    standard ops, its meaning (its types are those of the values it is given, none of less than f32:
    `build.write_body`; an absent optional input is None); None: the op is of the ONNX standard.
    doc: of an own op; the standard's are on the ONNX operator pages, opset 23. cases: sample inputs
    of an own op for the enumerating tests, attributes and input types such as `"f32[2,3,8]"`.

    elementwise: an element of an output depends on the elements in its place of the inputs, as
    they are broadcast. view: strides can say what it does. reshapes: the same elements in the same
    order, in another shape. reduces: its axes are summed or the like. random: draws where its
    attribute `ratio`, if it has one, is above 0. moves: its body hands elements on as they
    are, and needs no f32 for that. opaque: it runs in PyTorch alone, and its body
    raises. axes: the dims of its first input that it works along; along the others rows stay rows,
    in their order. None: it cannot be said.

    flops: two for each multiplication with its addition, of matrix products; moved: bytes read and
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
        """The types of a call's outputs, as the record infers them."""
        found = self.infer(call)
        return found if isinstance(found, list) else [found]


def standard(infer: Infer, *names: str, **traits: Any) -> tuple[Op, ...]:
    """Makes records of ops of the ONNX standard that share their type rule and their traits."""
    if traits.get("elementwise"):
        traits.setdefault("axes", no_axes)
    return tuple(Op(name, infer, **traits) for name in names)


def axis_attribute(default: int) -> Axes:
    """`Op.axes` of the dim that the attribute `axis` names."""

    def axes(node: Node) -> tuple[int, ...]:
        return (int(attributes(node).get("axis", default)) % type_of(node.inputs[0]).rank,)

    return axes


__all__ = ["Axes", "Op", "Types", "axis_attribute", "no_axes", "standard"]
