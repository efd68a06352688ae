"""What views show of a value, and which halves of a step read it."""

from __future__ import annotations

from onward.graph.graph import Value

# views that show all of a value once
WHOLE = ("Reshape", "Squeeze", "Unsqueeze", "Transpose", "Identity")


def shown(y: Value, backward: bool = False) -> set[Value]:
    """y, and what nodes of one half show of it whole."""
    found, stack = {y}, [y]
    while stack:
        for node in stack.pop().consumers():
            view = node.outputs[0]
            here = bool(node.meta.get("backward")) == backward
            if here and node.op_type in WHOLE and view not in found:
                found.add(view)
                stack.append(view)
    return found


def halves_of(values: set[Value]) -> set[bool]:
    """The halves that read them, beside those of them that show another: backward or not."""
    readers = {n for y in values for n in y.consumers() if n.outputs[0] not in values}
    return {bool(n.meta.get("backward")) for n in readers}
