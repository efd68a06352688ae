"""The order of launches: as the graph has it, with each update as soon as it is safe.

An update overwrites its parameter, so it runs after every other reader of it; run early, it
frees the gradient at once.
"""

from __future__ import annotations

from onward.graph.graph import Graph, Node, Value


def order(graph: Graph) -> list[Node]:
    """A topological order of all nodes."""
    overwrites: dict[Node, list[Value]] = {}
    for name, source in graph.state.items():
        producer = graph.outputs[name].producer()
        if producer is not None and source in producer.inputs:
            overwrites.setdefault(producer, []).append(source)
    unread = {
        source: set(source.consumers()) for sources in overwrites.values() for source in sources
    }
    nodes = list(graph)
    waiting: dict[Node, int] = {}  # update -> inputs not yet made, plus readers not yet run
    blocks: dict[Node, list[Node]] = {}  # node -> updates that wait for it
    for update, sources in overwrites.items():
        before = {v.producer() for v in update.inputs if v is not None}
        for source in sources:
            before |= unread[source]
        before -= {None, update}
        waiting[update] = len(before)
        for node in before:
            if node is not None:
                blocks.setdefault(node, []).append(update)
    free = {update for update, count in waiting.items() if not count}  # nothing to wait for
    out: list[Node] = []

    def emit(node: Node) -> None:
        out.append(node)
        for update in blocks.get(node, ()):
            waiting[update] -= 1
            if waiting[update] == 0:
                emit(update)

    for node in nodes:
        if node not in overwrites or node in free:
            emit(node)
    assert len(out) == len(nodes), "an update waits for a reader that waits for the update"
    place = {node: i for i, node in enumerate(out)}
    for node in out:
        for value in node.inputs:
            maker = value.producer() if value is not None else None
            assert maker is None or place[maker] < place[node], "a reader of an update runs first"
    return out


def sort(graph: Graph) -> None:
    """Puts the graph's own list of nodes into launch order."""
    nodes = order(graph)
    graph.ir.remove(nodes)
    graph.ir.extend(nodes)
