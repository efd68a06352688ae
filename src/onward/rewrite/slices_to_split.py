"""`x[:, :n], x[:, n:2n], x[:, 2n:]  =>  Split(x)`, and `x[0], x[1], x[2]` likewise.

The gradient of a Split is one Concat; each Slice has a Pad as its gradient, and all Pads are added.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, array_of, attributes, content_of, type_of
from onward.graph.ops.shape import clamp_slice
from onward.graph.types import Size

Part = tuple[Node, int, Size, Size]  # the node takes indices `start:end` of a dim


def slices_to_split(graph: Graph) -> int:
    """Replaces Slices of step 1 (and Gathers of one constant index) that tile a dim by one
    Split."""
    groups: dict[tuple[Value, int], list[Part]] = {}
    for node in graph:
        part = _part(node)
        if part is not None and node.inputs[0] is not None:
            groups.setdefault((node.inputs[0], part[1]), []).append(part)
    edits = 0
    for (x, dim), parts in groups.items():
        tiles = _tiles(parts, type_of(x).shape[dim])
        if tiles is None:
            continue
        first = parts[0][0]  # first in the graph's order
        # read again, since it may itself have been a Slice that is now a Split's output
        x = first.inputs[0]
        b = Builder.at(graph, first)
        pieces = b.Split(x, b.sizes([end - start for start, end in tiles]), axis=dim)
        for node, _, start, end in parts:
            piece = pieces[tiles.index((start, end))]
            y = node.outputs[0]
            graph.replace(y, Builder.at(graph, node).reshape(piece, type_of(y).shape))
            graph.remove([node])
            edits += 1
    return edits


def _part(node: Node) -> Part | None:
    """The window on one dim of its first input that a node takes; None for other nodes."""
    if node.op_type not in ("Slice", "Gather") or content_of(node.outputs[0]) is not None:
        return None  # shapes stay sliced: shape inference follows their values
    shape = type_of(node.inputs[0]).shape
    if node.op_type == "Gather":
        index, dim = array_of(node.inputs[1]), attributes(node).get("axis", 0) % len(shape)
        if index is None or index.size != 1:
            return None
        start, size = int(index.reshape(-1)[0]), shape[dim]
        start = start if start >= 0 else size + start
        return node, dim, start, start + 1
    starts, ends = content_of(node.inputs[1]), content_of(node.inputs[2])
    dims = content_of(node.inputs[3]) if len(node.inputs) > 3 else (0,)
    steps = content_of(node.inputs[4]) if len(node.inputs) > 4 else (1,)
    if starts is None or ends is None or steps != (1,) or dims is None or len(dims) != 1:
        return None
    if len(starts) != 1 or not isinstance(dims[0], int):
        return None
    dim = dims[0] % len(shape)
    start, end = clamp_slice(starts[0], ends[0], shape[dim])
    return node, dim, start, end


def _tiles(parts: list[Part], size: Size) -> list[tuple[Size, Size]] | None:
    """The distinct windows in order, if they cover `0:size` exactly once; else None."""
    ends: dict[Size, Size] = {}
    for _, _, start, end in parts:
        if start == end or ends.setdefault(start, end) != end:
            return None
    tiles: list[tuple[Size, Size]] = []
    at: Size = 0
    while at != size:
        if at not in ends:
            return None
        tiles.append((at, ends.pop(at)))
        at = tiles[-1][1]
    return tiles if not ends and len(tiles) > 1 else None
