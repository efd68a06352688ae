"""The order of launches: the graph's order, but launches that free memory run as early as possible.

An update overwrites its parameter, so it runs after every other reader of it. No state is written
before the forward half and the backwards of all regions are done, since only these can reject a
batch. If the graph tests whether its gradients are finite, updates come after everything else, so
that they can be skipped; if not, an update runs early and frees the gradient at once. A backward
launch that frees more than it allocates, such as a weight's gradient that is the last to read a
layer's input, runs as soon as its operands are ready.

In a graph that runs in two halves, launches that its outputs need come before all others.

Collectives start in the order of their numbers, which all ranks share, and as soon as their
operands are ready, but for those that are `placed`, such as the gathering of a parameter, which is
ready from the beginning; they are waited for where the graph has the wait. Nothing that differs
from rank to rank, such as bytes, decides which collective starts first. Those that are part of an
`update` come behind all that decides whether there is one, on ranks that write nothing too.

In a step of a pipeline, launches have the number of their action, and none runs before an action
with a lower number is done. No state is written before all of them are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onward.graph.chains import chained
from onward.graph.graph import Graph, Node, Role, Value, attributes, needed, type_of
from onward.graph.ops.collective import STARTS, WAIT, sequence_of, start_of
from onward.plan.views import VIEWS


def order(graph: Graph) -> list[Node]:
    """A topological order of all nodes."""
    out = _Order(graph).nodes
    if graph.signature.split_halves:
        first = forward_half(graph)
        out = [n for n in out if n in first] + [n for n in out if n not in first]
    numbers = [sequence_of(node) for node in out if node.op_type in STARTS]
    if numbers != sorted(numbers):
        raise ValueError(f"the halves of the graph start its collectives in the order {numbers}")
    assert len(out) == len(graph), "an update waits for a reader that waits for the update"
    place = {node: i for i, node in enumerate(out)}
    for node in out:
        for value in node.inputs:
            maker = value.producer() if value is not None else None
            assert maker is None or place[maker] < place[node], "a reader of an update runs first"
    return out


def forward_half(graph: Graph) -> set[Node]:
    """The nodes that the graph's outputs other than gradients need. Raises ValueError where one of
    them needs a cotangent, and where a later node reads state after its update."""
    found = needed(graph, set(graph.outputs) - set(graph.signature.gradients.values()))
    for value in graph.inputs_with(Role.COTANGENT):
        early = next((node for node in value.consumers() if node in found), None)
        if early is not None:
            raise ValueError(
                f"{early.op_type} needs an output's gradient before the forward is done"
            )
    for source in graph.state.values():
        late = next((node for node in source.consumers() if node not in found), None)
        if late is not None:
            raise ValueError(f"a gradient ({late.op_type}) reads {source.name} after its update")
    return found


def sort(graph: Graph) -> None:
    """Reorders the graph's own list of nodes into launch order."""
    nodes = order(graph)
    graph.ir.remove(nodes)
    graph.ir.extend(nodes)


def _numbered(graph: Graph) -> list[Node]:
    """The graph's nodes, moved as little as possible so that collectives start in the order of
    their numbers. Raises ValueError where a collective needs the result of a later one."""
    nodes = list(graph)
    starts = sorted((n for n in nodes if n.op_type in STARTS), key=sequence_of)
    if len(starts) < 2:
        return nodes
    out = chained(nodes, starts)
    if len(out) < len(nodes):
        there = set(out)
        first = next(n for n in starts if n not in there)
        raise ValueError(
            f"the collective {sequence_of(first)} ({first.op_type}) needs the result of a later one"
        )
    return out


class _Order:
    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = []
        given = _numbered(graph)
        self._kept = graph.output_values()
        self._updates = updates_in_place(graph)
        self._late = _behind(graph, self._updates)
        self._waiting: dict[Node, int] = {}  # number of nodes that must run before it
        self._followers: dict[Node, list[Node]] = {}
        self._memory: dict[Value, Value] = {}  # of a view: the value whose memory it shows
        # launches that have yet to read a value's memory
        self._readers: dict[Value, set[Node]] = {}
        self._index = {node: i for i, node in enumerate(given)}
        self._start: Node | None = None  # the last start of a collective that was entered
        self._done: set[Node] = set()
        self._action = 0  # of a pipeline, that runs at present
        last = any(n.op_type == "AllFinite" or "action" in n.meta for n in graph)
        self._first = {  # nodes to run before any update
            n
            for n in graph
            if n not in self._late
            and (last or not n.meta.get("backward") or n.op_type == "RegionGrad")
        }
        for node in given:
            self._enter(node)
        for node in given:
            if node not in self._done and (node not in self._late or self._ready(node)):
                self._action = max(self._action, node.meta.get("action", 0))
                self._run(node)
        for node in given:  # updates that had to wait for the last of `_first`, and what reads them
            if node not in self._done and self._ready(node):
                self._run(node)

    def _enter(self, node: Node) -> None:
        before = {v.producer() for v in node.inputs if v is not None}
        for source in self._updates.get(node, ()):
            before |= set(source.consumers())
        if node.op_type in STARTS:  # in the order of their numbers
            before.add(self._start)
            self._start = node
        before -= {None, node}
        self._waiting[node] = len(before)
        for other in before:
            if other is not None:
                self._followers.setdefault(other, []).append(node)
        x = node.inputs[0] if node.inputs else None
        if node.op_type in VIEWS and x is not None:
            for y in node.outputs:
                self._memory[y] = self._memory.get(x, x)
                if y in self._kept:
                    self._kept.add(self._memory[y])
        else:
            for value in self._reads(node):
                self._readers.setdefault(value, set()).add(node)

    def _reads(self, node: Node) -> set[Value]:
        return {self._memory.get(v, v) for v in node.inputs if v is not None}

    def _run(self, node: Node) -> None:
        """Appends the node, and after it all nodes that should now run at once."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node in self._done:
                continue
            self._done.add(node)
            self._first.discard(node)
            self.nodes.append(node)
            near: set[Node] = set(self._followers.get(node, []))
            for other in near:
                self._waiting[other] -= 1
            for value in self._reads(node):
                left = self._readers.get(value, set())
                left.discard(node)
                if len(left) == 1:
                    near |= left
            found = [n for n in near if n not in self._done and self._at_once(n)]
            stack += sorted(found, key=self._index.__getitem__, reverse=True)

    def _ready(self, node: Node) -> bool:
        return self._waiting[node] == 0 and not self._first

    def _at_once(self, node: Node) -> bool:
        if self._waiting[node] > 0 or node.meta.get("action", 0) > self._action:
            return False
        if node in self._updates and node.op_type not in STARTS:
            return self._ready(node)
        if node in self._late and not self._ready(node):
            return False
        if node.op_type in STARTS or node.op_type == WAIT:  # starts run early, waits late
            return node.op_type != WAIT and not attributes(node).get("placed")
        if not node.meta.get("backward") or node.meta.get("again"):
            return False  # recomputed nodes already stand where they are first read
        if node.outputs[0] in self._memory:  # a view is free; but a view of a forward value waits,
            maker = self._memory[node.outputs[0]].producer()  # since that value may be recomputed
            return maker is not None and bool(maker.meta.get("backward"))
        return self._frees(node) > 0

    def _frees(self, node: Node) -> int:
        """The bytes freed by running the node, less the bytes that it allocates."""
        freed = sum(
            type_of(v).nbytes
            for v in self._reads(node)
            if v.producer() is not None and v not in self._kept and self._readers[v] == {node}
        )
        return freed - sum(type_of(y).nbytes for y in node.outputs)


def updates_in_place(graph: Graph) -> dict[Node, list[Value]]:
    """The nodes that may overwrite inputs, with these inputs. Two kinds of updates are not among
    them, and their results are copied at the end: one whose result is read again, such as a step
    count that the forward uses, and one that a reader of its input waits for, such as the second
    of two buffers that are each added to the other."""
    found: dict[Node, list[Value]] = {}
    for name, source in graph.state.items():
        following = graph.outputs[name]
        producer = None if following.uses() else following.producer()
        if producer is not None and producer.op_type == WAIT:
            producer = start_of(producer)
        if producer is not None and source in producer.inputs:
            found.setdefault(producer, []).append(source)
    ahead: dict[Node, list[Node]] = {}  # node -> the updates that wait for it as a reader
    for node, sources in list(found.items()):
        readers = {n for source in sources for n in source.consumers()} - {node}
        if readers and readers & _behind_all(node, ahead):
            del found[node]
            continue
        for reader in readers:
            ahead.setdefault(reader, []).append(node)
    return found


def _behind_all(node: Node, ahead: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """The nodes that run after this one: they read what it makes, or wait for it as a reader of
    what they overwrite."""
    found: set[Node] = set()
    stack = [node]
    while stack:
        last = stack.pop()
        after = {reader for y in last.outputs for reader in y.consumers()}.union(
            ahead.get(last, ())
        )
        stack += after - found
        found |= after
    return found


def _behind(graph: Graph, updates: Mapping[Node, object]) -> set[Node]:
    """The updates and collectives of updates, and the nodes that read what they make, such as the
    exchange of parameters of which each rank has updated a part."""
    found = set(updates) | {n for n in graph if n.op_type in STARTS and attributes(n).get("update")}
    if any(y.uses() for node in found for y in node.outputs):
        for node in graph:
            if any(x is not None and x.producer() in found for x in node.inputs):
                found.add(node)
    return found
