"""ZeRO stage 3 (arXiv 1910.02054): each rank holds a part of every large parameter, and gathers the
whole ahead of its use.

    forward:    parts of all ranks -> the whole parameter    while the layers before it run
                the layer that reads it                      the last reader frees its memory
    backward:   parts of all ranks -> the whole parameter    unless it is still there
    update:     of this rank's part, by `zero`

Where every reader casts a parameter to fewer bytes, parts are cast before they are exchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onward.distribute.collectives import IN_FLIGHT, Collectives, StartedCollective
from onward.distribute.mesh import Mesh
from onward.graph.build import Builder, handed_on
from onward.graph.graph import Graph, Node, Value, array_of, attributes, type_of, where
from onward.graph.names import user_name
from onward.graph.ops import OPS
from onward.graph.types import DType
from onward.shards import Shard

# bytes of whole parameters that stay for a later reader; one reader's own stay whatever they are
KEPT = 2 * IN_FLIGHT


@dataclass
class GatheredSpan:
    """The nodes that read one gathered copy of a parameter. first: index of the first of them in
    the graph. start: index of the node before which the all-gather starts."""

    name: str
    first: int
    nodes: list[Node] = field(default_factory=list)
    start: int = 0
    started: StartedCollective | None = None
    values: dict[Value, Value] = field(default_factory=dict)


def gathered_ahead(graph: Graph, mesh: Mesh, held: Mapping[str, Shard], kept: int = KEPT) -> Graph:
    """Returns a copy of a graph whose inputs `held` are this rank's parts, each as one row, and
    whose nodes read whole parameters that are gathered ahead of them.

    An update of such a parameter reads the part. kept: bytes of gathered parameters that stay for a
    later reader. In the graph of a rank of a pipeline, which has all of its micro-batches, readers
    are those of all actions in their order: weights of a stage that fit into `kept` are gathered
    once a step, and others for each action, so that memory is bounded whatever a stage has.
    """
    graph = graph.clone()
    sources = _Sources(graph, held)
    nodes = list(graph)
    spans = _spans(sources, nodes, kept)
    _place_starts(sources, spans)
    exchange = Collectives(graph, mesh)
    for name, shard in held.items():
        value = graph.find_input(name)
        value.meta["type"] = type_of(value).with_shape((shard.size,))
    starts, ends = defaultdict[int, list[GatheredSpan]](list), defaultdict(list)
    reads = defaultdict[Node, list[GatheredSpan]](list)
    for span in spans:
        starts[span.start].append(span)
        ends[span.first].append(span)
        for node in span.nodes:
            reads[node].append(span)
    for i, node in enumerate(nodes):
        for span in starts[i]:
            span.started = _start(exchange, graph, sources, span, held[span.name], node)
        for span in ends[i]:
            _end(graph, sources, span, held[span.name], node)
        for span in reads[node]:
            _read(graph, sources, span, node)
    for node in reversed(sources.derived):
        if not any(y.uses() for y in node.outputs):
            graph.remove([node])
    return graph


class _Sources:
    """The values that are parameters, or follow from one parameter alone by views and casts.

    of: the parameter by such a value. derived: the nodes that make them. whole: by parameter, the
    values that it is gathered as: itself, or what every reader casts it to.
    """

    def __init__(self, graph: Graph, held: Mapping[str, Shard]) -> None:
        self._updates = {graph.outputs[out].producer() for out in graph.signature.updated.values()}
        self.of = {graph.find_input(name): name for name in held}
        self.types = {name: type_of(graph.find_input(name)) for name in held}
        self.whole = {name: self._gathered_as(graph.find_input(name)) for name in held}
        self.derived: dict[Node, None] = {}
        ends = graph.output_values()
        for node in graph:
            x = node.inputs[0] if node.inputs else None
            if x is None or x not in self.of or node in self._updates:
                continue
            op = OPS[node.op_type]
            follows = op.view or op.reshapes or node.op_type in ("Cast", "Identity")
            rest = all(y is None or array_of(y) is not None for y in node.inputs[1:])
            if follows and rest and len(node.outputs) == 1 and node.outputs[0] not in ends:
                self.of[node.outputs[0]] = self.of[x]
                self.derived[node] = None

    def read(self, node: Node) -> list[str]:
        """The parameters that a node reads, in the order of its inputs; none of nodes that make a
        value which follows from one, and of updates, which read a part."""
        if node in self.derived or node in self._updates:
            return []
        names = (self.of.get(x) for x in node.inputs if x is not None)
        return list(dict.fromkeys(name for name in names if name is not None))

    def dtype(self, name: str) -> DType:
        """The element type in which a parameter is gathered."""
        return type_of(self.whole[name][0]).dtype

    def nbytes(self, name: str) -> int:
        """The bytes of the gathered parameter."""
        return int(self.types[name].numel) * self.dtype(name).itemsize  # type: ignore[arg-type]

    def _gathered_as(self, value: Value) -> list[Value]:
        readers = [node for node in value.consumers() if node not in self._updates]
        cast = [node.outputs[0] for node in readers if node.op_type == "Cast"]
        kinds = {type_of(y).dtype for y in cast}
        if len(cast) < len(readers) or len(kinds) != 1:
            return [value]
        return cast if kinds.pop().itemsize < type_of(value).dtype.itemsize else [value]


def _spans(sources: _Sources, nodes: Sequence[Node], kept: int) -> list[GatheredSpan]:
    """The spans of all parameters, in the order of their first nodes. While more than `kept`
    bytes are gathered, the one whose next reader is farthest away is freed (Belady's rule)."""
    uses: dict[str, list[int]] = {}
    for i, node in enumerate(nodes):
        for name in sources.read(node):
            uses.setdefault(name, []).append(i)
    later = {name: iter([*at[1:], len(nodes)]) for name, at in uses.items()}
    alive: dict[str, GatheredSpan] = {}
    following: dict[str, int] = {}
    found: list[GatheredSpan] = []
    for i, node in enumerate(nodes):
        for name in sources.read(node):
            if name not in alive:
                alive[name] = GatheredSpan(name, i)
                found.append(alive[name])
            alive[name].nodes.append(node)
            following[name] = next(later[name])
        alive = {name: span for name, span in alive.items() if following[name] < len(nodes)}
        while len(alive) > 1 and sum(map(sources.nbytes, alive)) > kept:
            del alive[max(alive, key=following.__getitem__)]
    return found


def _place_starts(sources: _Sources, spans: Sequence[GatheredSpan]) -> None:
    """Sets where the exchanges start: as many at once as `IN_FLIGHT` takes, and one ahead at
    least."""
    for k, span in enumerate(spans):
        j, nbytes = k, sources.nbytes(span.name)
        while j > 0 and (j == k or nbytes + sources.nbytes(spans[j - 1].name) <= IN_FLIGHT):
            j -= 1
            nbytes += sources.nbytes(spans[j].name)
        span.start = spans[j].first


def _start(
    exchange: Collectives,
    graph: Graph,
    sources: _Sources,
    span: GatheredSpan,
    shard: Shard,
    before: Node,
) -> StartedCollective:
    """Starts to gather a parameter. The exchange keeps its place in the graph, since its operand is
    ready from the beginning."""
    reader = span.nodes[0]
    backward = bool(reader.meta.get("backward"))
    b = Builder(graph, before, where(reader), backward, marks=handed_on(before))
    part = b.cast(graph.find_input(span.name), sources.dtype(span.name))
    if shard.size < shard.length:
        zeros = np.zeros(shard.length - shard.size, type_of(part).dtype.numpy())
        part = b.Concat(part, b.const(zeros), axis=0)
    record = f"{user_name(span.name)} for the {'backward' if backward else 'forward'}"
    return exchange.start(b, "AllGatherStart", [part], shard.axis, record, placed=1)


def _end(graph: Graph, sources: _Sources, span: GatheredSpan, shard: Shard, before: Node) -> None:
    """Waits for a parameter, ahead of its first reader."""
    assert span.started is not None, "an exchange ends before it starts"
    reader = span.nodes[0]
    backward = bool(reader.meta.get("backward"))
    b = Builder(graph, before, where(reader), backward, marks=handed_on(before))
    [whole] = span.started.wait(b)
    if shard.padding:
        whole = b.Slice(whole, b.ints([0]), b.ints([shard.elements]))
    whole = b.reshape(whole, sources.types[span.name].shape)
    span.values = dict.fromkeys(sources.whole[span.name], whole)


def _read(graph: Graph, sources: _Sources, span: GatheredSpan, node: Node) -> None:
    """Has a node read the gathered parameter, or what follows from that."""

    def gathered(value: Value) -> Value:
        if value not in span.values:
            maker = value.producer()
            assert maker is not None, f"{span.name} is gathered in one type and read in another"
            x, *rest = maker.inputs
            assert x is not None, "what follows from a parameter reads it first"
            b = Builder.at(graph, maker, node)
            b.marks = handed_on(node)
            span.values[value] = b.one(maker.op_type, [gathered(x), *rest], attributes(maker))
        return span.values[value]

    for i, x in enumerate(node.inputs):
        if x is not None and sources.of.get(x) == span.name:
            node.replace_input_with(i, gathered(x))


__all__ = ["KEPT", "GatheredSpan", "gathered_ahead"]
