"""Writes the graph of one rank, once the way of every call is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onward.distribute.tensor.conversions import Finish, from_whole, start_conversion
from onward.distribute.tensor.sharding import REPLICATED, Sharding
from onward.distribute.tensor.solve import Solution
from onward.distribute.tensor.ways import RankPlace, Way, same_op
from onward.graph.build import Builder, handed_on
from onward.graph.graph import (
    Graph,
    Node,
    Value,
    array_of,
    precision_said,
    role_of,
    type_of,
    where,
)
from onward.graph.ops.collective import WAIT, held_inputs, start_of


def write_rank(source: Graph, solution: Solution, graph: Graph, place: RankPlace) -> Graph:
    """Fills `graph`, which is empty, with what the rank at this place runs, and returns it.

    source: the graph of one rank alone, to which the solution belongs.
    """
    return _RankGraph(source, solution, graph, place).write()


class _RankGraph:
    """The graph of one rank under construction.

    here: what the rank has of a value of the source, by sharding, and whether backward has gathered
    it again. started: exchanges that end where their result is read. Nodes keep the stage of a
    pipeline that they have; an exchange is on the stage that makes its operand, so that its halves
    are on one.
    """

    def __init__(self, source: Graph, solution: Solution, graph: Graph, place: RankPlace) -> None:
        self._source, self._solution = source, solution
        self._graph, self._place = graph, place
        self._here: dict[tuple[Value, Sharding, bool], Value] = {}
        self._started: dict[tuple[Value, Sharding], Finish] = {}
        self._is_backward = False
        self._shared: dict[object, dict[Any, Any]] = {}  # of `RankPlace`, by stage
        self._early: dict[Value, list[Sharding]] = {}
        for (value, want), have in solution.conversions.items():
            if have == solution.made[value] != REPLICATED and value.producer() is not None:
                self._early.setdefault(value, []).append(want)

    def write(self) -> Graph:
        source, graph, made = self._source, self._graph, self._solution.made
        graph.settle(source.names_made)
        graph.counts, graph.signature = set(source.counts), source.signature
        for value in source.inputs:
            role = role_of(value)
            assert role is not None and value.name is not None
            local = made[value].local(type_of(value), self._place.ranks)
            twin = graph.input(value.name, local, role)
            if "content" in value.meta and local == type_of(value):
                twin.meta["content"] = value.meta["content"]
            self._here[value, made[value], False] = twin
        for value in source.ir.initializers.values():
            array = array_of(value)
            assert array is not None
            self._here[value, REPLICATED, False] = graph.constant(array)
        for node in source:
            self._write_node(node)
        b = Builder(graph, module="optimizer", backward=True)
        for name, value in source.outputs.items():
            graph.outputs[name] = self._read(b, value, self._solution.wanted[name])
        inputs = {v: self._here[v, made[v], False] for v in source.inputs}
        graph.state = {name: inputs[v] for name, v in source.state.items()}
        graph.sweep()
        return graph

    def _write_node(self, node: Node) -> None:
        way = self._solution.ways[node]
        self._is_backward = bool(node.meta.get("backward"))
        b = self._builder(node)
        if node.op_type == WAIT:
            outputs = self._checked(node, way, self._waited(b, node))
        else:
            outputs = self._written(b, node, way)
        for y, s, local in zip(node.outputs, way.outputs, outputs, strict=True):
            self._here[y, s, False] = local
            for want in self._early.get(y, ()):
                self._start(b, y, s, want)

    def _written(self, b: Builder, node: Node, way: Way) -> list[Value]:
        """What the rank makes in the place of a node, by its way."""
        inputs = [None if x is None or s is None else self._read(b, x, s)
                  for x, s in zip(node.inputs, way.inputs, strict=True)]  # fmt: skip
        if way.program is None and not way.shares_work:  # no size changes
            return self._copied(node, inputs)
        program = way.program
        place = self._placed(b)
        made = same_op(b, node, inputs) if program is None else program(b, node, inputs, place)
        return self._checked(node, way, list(made))

    def _waited(self, b: Builder, node: Node) -> list[Value]:
        """The wait of an exchange along another axis, for what the rank has started."""
        source = start_of(node)
        shardings = self._solution.ways[source].outputs
        begun = [self._here[y, s, False] for y, s in zip(source.outputs, shardings, strict=True)]
        start = begun[0].producer()
        assert start is not None, "an exchange that has no start"
        return same_op(b, node, [*begun, *held_inputs(start)])

    def _copied(self, node: Node, inputs: list[Value | None]) -> list[Value]:
        """The node as it is, on what the rank has."""
        outputs = [Value(name=y.name) for y in node.outputs]
        for y, twin in zip(node.outputs, outputs, strict=True):
            twin.meta.update(y.meta)
        made = Node(
            node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs,
            name=node.name, metadata_props=dict(node.metadata_props),
        )  # fmt: skip
        made.meta.update(node.meta)
        self._graph.ir.append(made)
        return outputs

    def _checked(self, node: Node, way: Way, made: list[Value]) -> list[Value]:
        """What the rank has made, which has the types that the way says."""
        for y, s, local in zip(node.outputs, way.outputs, made, strict=True):
            want = s.local(type_of(y), self._place.ranks)
            assert type_of(local) == want, (
                f"{node.op_type} of {where(node)} makes {type_of(local)} on a rank, not {want}, by "
                f"the way {way}"
            )
        return made

    def _read(self, b: Builder, value: Value, want: Sharding) -> Value:
        """What the rank has of a value in this sharding; ends the exchange that makes it."""
        again = self._is_gathered_again(value, want)
        key = (value, want, again)
        if key in self._here:
            return self._here[key]
        b = self._on_own_stage(b, value)
        if again:
            self._here[key] = self._started_conversion(b, value, want, placed=1)(b)
            return self._here[key]
        if (value, want) not in self._started:
            have = self._solution.conversions[value, want]
            if have == REPLICATED:
                whole = self._read(b, value, have)
                made = from_whole(b, whole, want, self._placed(b))
                if value.producer() is not None or "stage" not in b.marks:
                    self._here[key] = made  # each stage has its own part of an input
                return made
            self._start(b, value, have, want)
        self._here[key] = self._started[value, want](b)
        return self._here[key]

    def _builder(self, node: Node) -> Builder:
        """A Builder that appends nodes with the module, half, precision and marks of a node."""
        is_backward = bool(node.meta.get("backward"))
        said, marks = precision_said(node), handed_on(node)
        return Builder(self._graph, None, where(node), is_backward, said, marks)

    def _on_own_stage(self, b: Builder, value: Value) -> Builder:
        """A Builder for the conversion of a value: on the stage of the node that makes it."""
        maker = value.producer()
        stage = None if maker is None else maker.meta.get("stage")
        return b if maker is None or b.marks.get("stage") == stage else self._builder(maker)

    def _is_gathered_again(self, value: Value, want: Sharding) -> bool:
        """Whether backward gathers a value anew that forward has made in parts."""
        maker, made = value.producer(), self._solution.made[value]
        if not self._solution.gathers_again or not self._is_backward or maker is None:
            return False
        if value in self._solution.gathered_once:
            return False
        return made.dim is not None and want == REPLICATED and not maker.meta.get("backward")

    def _start(self, b: Builder, value: Value, have: Sharding, want: Sharding) -> None:
        """Starts an exchange where its operand is there."""
        self._started[value, want] = self._started_conversion(b, value, want, have=have)

    def _started_conversion(
        self,
        b: Builder,
        value: Value,
        want: Sharding,
        have: Sharding | None = None,
        placed: int = 0,
    ) -> Finish:
        """Starts the conversion of a value; returns a function that ends it. placed: 1 where it
        starts no earlier than here."""
        have = self._solution.made[value] if have is None else have
        maker = value.producer()
        said = value.name if maker is None else f"{maker.op_type} of {where(maker) or 'the step'}"
        record = f"{said}: {have} to {want}"
        x = self._read(b, value, have)
        return start_conversion(b, x, type_of(value), have, want, self._placed(b), record, placed)

    def _placed(self, b: Builder) -> RankPlace:
        """The rank's place, with what calls and conversions on the Builder's stage share."""
        return replace(self._place, shared=self._shared.setdefault(b.marks.get("stage"), {}))


__all__ = ["write_rank"]
