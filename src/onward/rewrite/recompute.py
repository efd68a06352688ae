"""`y = f(x); ...; dz = g(dy, y)  =>  dz = g(dy, f(x))`: y is recomputed, so that it need not be
kept.

This pass is in no list: the plan chooses the values (`plan/recompute.py`). Results stay the same to
the bit: the same op reads the same inputs, and a random op of the same site draws the same mask.
"""

from __future__ import annotations

from collections.abc import Collection

from onward.graph.graph import Graph, Node, Value


def recompute(graph: Graph, names: Collection[str]) -> int:
    """Makes copies ("twins") of the nodes of the forward values `names`; the backward half, and the
    twins themselves, read these. A twin stands just before its first reader. Returns the number of
    twins."""
    place = {node: i for i, node in enumerate(graph)}
    twins: dict[Value, Value] = {}
    for node in list(graph):
        if not node.meta.get("backward"):
            continue
        chain = _chain(node, names, twins)
        for maker in sorted(chain, key=place.__getitem__):
            graph.ir.insert_before(node, _twin(maker, twins))
        for i, x in enumerate(node.inputs):
            if x in twins:
                node.replace_input_with(i, twins[x])
    return len({twin.producer() for twin in twins.values()})


def _chain(node: Node, names: Collection[str], twins: dict[Value, Value]) -> set[Node]:
    """The forward nodes that must run again before `node` and have no twin yet."""
    chain: set[Node] = set()
    stack = [node]
    while stack:
        for x in stack.pop().inputs:
            if x is None or x.name not in names or x in twins:
                continue
            maker = x.producer()
            if maker is None or maker in chain or maker.meta.get("backward"):
                continue
            chain.add(maker)
            stack.append(maker)
    return chain


def _twin(node: Node, twins: dict[Value, Value]) -> Node:
    outputs = [Value(name=f"{y.name}.again") for y in node.outputs]
    for y, twin in zip(node.outputs, outputs, strict=True):
        twin.meta.update(y.meta)
    inputs = [None if x is None else twins.get(x, x) for x in node.inputs]
    twins.update(zip(node.outputs, outputs, strict=True))
    made = Node(
        node.domain,
        node.op_type,
        inputs,
        list(node.attributes.values()),
        outputs=outputs,
        name=f"{node.name}.again",
        metadata_props=dict(node.metadata_props),
    )
    made.meta.update(node.meta)
    made.meta["backward"] = made.meta["again"] = True
    return made
