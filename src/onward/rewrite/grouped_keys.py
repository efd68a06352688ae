"""`Attention(q, repeated(k), repeated(v))  =>  Attention(q, k, v)`.

Query heads that share a key and value head ("GQA", arXiv 2305.13245) then share its memory.

repeated(k) is k f[B,G,S,K] with each head n times in a row: unsqueezed, expanded and reshaped.
"""

from __future__ import annotations

from onward.graph.graph import Graph, Value, type_of


def grouped_keys(graph: Graph) -> int:
    edits = 0
    for node in graph:
        if node.op_type != "Attention":
            continue
        k, v = node.inputs[1:3]
        own = [_repeated(x) for x in (k, v)]
        if own[0] is None or own[1] is None:
            continue
        if type_of(own[0]).shape[1] != type_of(own[1]).shape[1]:
            continue
        for i, x in zip((1, 2), own, strict=True):
            node.replace_input_with(i, x)
        edits += 1
    return edits


def _repeated(value: Value | None) -> Value | None:
    """The k of a value `repeated(k)`; None for other values."""
    names = ("Reshape", "Expand", ("Unsqueeze", "Reshape"))
    found, shapes = value, [] if value is None else [type_of(value).shape]
    for name in names:
        node = found.producer() if found is not None else None
        if node is None or node.op_type not in name:
            return None
        found = node.inputs[0]
        shapes.append(type_of(found).shape)
    if found is None or [len(s) for s in shapes] != [4, 5, 5, 4]:
        return None
    whole, wide, narrow, own = shapes
    batch, groups, *rows = own
    times = wide[2]
    if narrow != (batch, groups, 1, *rows) or wide != (batch, groups, times, *rows):
        return None
    return found if whole == (batch, groups * times, *rows) else None
