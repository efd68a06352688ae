"""The nodes of a model, with those of the bodies that nodes have as attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes, and the nodes of all bodies in them, in no order."""
    left = list(nodes)
    while left:
        node = left.pop()
        yield node
        for body in bodies_of(node):
            left += body.node


def bodies_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies that a node has as attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


__all__ = ["bodies_of", "nodes_within"]
