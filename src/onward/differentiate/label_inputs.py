"""The inputs of a graph that hold the labels of its loss, and what says that a label does not
count."""

from __future__ import annotations

from onward.differentiate.loss_sum import counted_cross_entropy
from onward.graph.graph import Graph, Role, Value, array_of, attributes, role_of
from onward.graph.ops.loss import ignored_label

# ops whose results are elements of their first input, or of all of them
_MOVES = frozenset({"Reshape", "Slice", "Squeeze", "Unsqueeze", "Transpose", "Flatten", "Identity",
                    "Cast", "Expand", "Split"})  # fmt: skip
_TABLES = ("Gather", "Embedding")


def label_inputs(graph: Graph) -> dict[str, int] | str:
    """The inputs of a forward graph in which every element is a label of its loss, by name, with
    the number of a label that does not count; or the reason why it is not known."""
    found = counted_cross_entropy(graph)
    if isinstance(found, str):
        return found
    node, labels = found
    ignored = ignored_label(attributes(node))
    values = _sources(labels, ignored)
    if isinstance(values, str):
        return values
    for value in values:
        if _is_read_as_ids(value):
            return f"{value.name} is read as ids too"
    return {value.name or "": ignored for value in values}


def _sources(labels: Value, ignored: int) -> list[Value] | str:
    """The batch's tensors whose elements labels are, beside constants that do not count."""
    found: list[Value] = []
    open_values = [labels]
    while open_values:
        value = open_values.pop()
        node = value.producer()
        if role_of(value) is Role.BATCH:
            found.append(value)
        elif (array := array_of(value)) is not None:
            if (array != ignored).any():
                return "labels are constants too"
        elif node is None:
            return f"labels are {value.name}"
        elif node.op_type in _MOVES or node.op_type == "Pad":
            if node.op_type == "Pad":
                filler = node.inputs[2] if len(node.inputs) > 2 else None
                array = None if filler is None else array_of(filler)
                if array is None or (array != ignored).any():
                    return "labels are padded with labels that count"
            assert node.inputs[0] is not None
            open_values.append(node.inputs[0])
        elif node.op_type == "Concat":
            open_values += [x for x in node.inputs if x is not None]
        else:
            return f"labels are computed by {node.op_type}"
    return found


def _is_read_as_ids(value: Value) -> bool:
    """Whether the elements of an input are numbers of rows in a table."""
    open_values = [value]
    while open_values:
        for use in open_values.pop().uses():
            if use.node.op_type in _TABLES and use.idx == 1:
                return True
            if use.node.op_type in _MOVES and use.idx == 0:
                open_values += use.node.outputs
    return False


__all__ = ["label_inputs"]
