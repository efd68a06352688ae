"""The views of a value, and whether both halves of a step read it."""

from __future__ import annotations

from onward.graph.graph import Value
from onward.graph.ops import named

_VIEWS = named("view")
# views that show each element of a value exactly once
WHOLE = ("Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity", "StopGradient")


def shown(y: Value, backward: bool = False) -> set[Value]:
    """y, and the values that nodes of one half make of it by views of the whole."""
    found, stack = {y}, [y]
    while stack:
        for node in stack.pop().consumers():
            view = node.outputs[0]
            here = bool(node.meta.get("backward")) == backward
            if here and node.op_type in WHOLE and view not in found:
                found.add(view)
                stack.append(view)
    return found


def source(x: Value) -> Value:
    """The value whose memory x shows, whole or in part, through any number of views."""
    node = x.producer()
    while node is not None and node.op_type in _VIEWS and node.inputs[0] is not None:
        x, node = node.inputs[0], node.inputs[0].producer()
    return x


def lives_through(values: set[Value]) -> bool:
    """Whether both halves read one of the values, not counting views among them, and no region
    does: a region keeps its inputs alive."""
    readers = {n for y in values for n in y.consumers() if n.outputs[0] not in values}
    held = any(n.op_type in ("Region", "RegionGrad") for n in readers)
    return not held and {bool(n.meta.get("backward")) for n in readers} == {False, True}
