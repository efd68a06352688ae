"""Writes the graph of one rank of a pipeline: forward and gradients of its stages, once for each
micro-batch, in the order of its actions, with the messages between them.

A tensor of the batch becomes one input for each micro-batch, whose number of rows has a name of its
own (`B.0`, `B.1`), so that micro-batches need not be equal. Gradients are summed in the order of
the micro-batches. Every rank counts the labels of all micro-batches, and has the loss of its own
stages alone, which is 0 where it does not have the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onward.distribute.mesh import Mesh
from onward.distribute.pipeline.messages import Message, action_of, digest_of, messages_of
from onward.distribute.pipeline.partition import Partition, partition
from onward.distribute.pipeline.schedules import Action, Part, Table, timeline
from onward.distribute.pipeline.staged_forward import StagedForward
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, array_of, role_of, type_of
from onward.graph.ops.collective import RECEIVE, SEND, WAIT, held_inputs
from onward.graph.types import Dim, Size, substitute, symbol

AXIS = "pp"
JoinDivisors: TypeAlias = Callable[[Builder, Sequence[Value]], Value]
_PARTS = {
    Part.FORWARD: (Part.FORWARD,),
    Part.BACKWARD: (Part.INPUT, Part.WEIGHT),
    Part.INPUT: (Part.INPUT,),
    Part.WEIGHT: (Part.WEIGHT,),
}


@dataclass(frozen=True)
class RankProgram:
    """The graph of one rank without its update. messages: how many messages all ranks exchange;
    other exchanges are numbered after them. digest: a hash of the messages."""

    graph: Graph
    messages: int
    digest: str


def batch_names(graph: Graph, micro_batches: int) -> dict[str, list[str]]:
    """Returns, by each input of the batch that has rows, the names of its micro-batches' inputs;
    nothing for one micro-batch. Raises OnwardError where rows are not dim 0."""
    if micro_batches == 1:
        return {}
    rows = rows_of(graph)
    found: dict[str, list[str]] = {}
    for value in graph.inputs_with(Role.BATCH):
        shape, name = type_of(value).shape, value.name or ""
        is_in = [isinstance(size, Dim) and rows in size.symbols for size in shape]
        if any(is_in[1:]) or (any(is_in) and str(shape[0]) != rows):
            raise OnwardError(
                f"{name} {type_of(value)} cannot be split into micro-batches of a pipeline; fix: "
                "tensors whose dim 0 is the samples"
            )
        if any(is_in):
            found[name] = [f"{name}.{m}" for m in range(micro_batches)]
    return found


def rows_of(graph: Graph) -> str:
    """The name of the number of samples: dim 0 of the first tensor of the batch. Raises OnwardError
    where the graph fixes the number of samples."""
    for value in graph.inputs_with(Role.BATCH):
        size = next(iter(type_of(value).shape), None)
        if isinstance(size, Dim):
            return str(size)
    raise OnwardError(
        "the batch has a fixed number of rows and cannot be split into the micro-batches of a "
        "pipeline; fix: give two rows at least, and no more pipeline_microbatches than rows"
    )


def micro_symbols(rows: str, micro_batches: int) -> list[str]:
    """The names of the numbers of rows of the micro-batches."""
    return [f"{rows}.{m}" for m in range(micro_batches)]


def write_rank(
    staged: StagedForward,
    differentiated: Graph,
    mesh: Mesh,
    table: Table,
    join_divisors: JoinDivisors | None = None,
) -> RankProgram:
    """Writes the graph of one rank. differentiated: the staged forward with the gradients of its
    trained parameters, or without any in an evaluation. join_divisors: makes one divisor of those
    of all micro-batches, where the forward has one."""
    stage_of_input = {name: stage for (_, stage), name in staged.inputs.items()}
    found = partition(differentiated, stage_of_input)
    messages = messages_of(found, table, timeline(table))
    writer = _RankWriter(staged, found, mesh, table, messages)
    writer.write(join_divisors)
    return RankProgram(writer.graph, len(messages), digest_of(messages))


@dataclass
class _RankWriter:
    """The graph of one rank under construction. made: values by that of the micro-batch's graph and
    the number of the micro-batch."""

    staged: StagedForward
    found: Partition
    mesh: Mesh
    table: Table
    messages: list[Message]
    graph: Graph = field(default_factory=lambda: Graph("pipeline"))
    made: dict[tuple[Value, int], Value] = field(default_factory=dict)
    shared: dict[Value, Value] = field(default_factory=dict)
    totals: dict[str, Value] = field(default_factory=dict)
    sent: dict[int, Node] = field(default_factory=dict)
    received: dict[int, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source = self.found.graph
        self.rank, self.ranks = self.mesh.coordinate(AXIS), self.mesh.size(AXIS)
        self.actions = self.table[self.rank]
        self.micros = len({action.micro for actions in self.table for action in actions})
        self.sizes: list[dict[str, Size]] = [{}]
        if self.micros > 1:
            self.rows = rows_of(self.source)
            names = micro_symbols(self.rows, self.micros)
            self.sizes = [{self.rows: symbol(name)} for name in names]
        self.timeline = timeline(self.table)

    def write(self, join_divisors: JoinDivisors | None) -> None:
        """Writes all of it."""
        self._inputs()
        signature, early = self.source.signature, Builder(self.graph, marks={"action": 0})
        if signature.divisor is not None and join_divisors is not None:
            divisor = self.source.outputs[signature.divisor]
            for m in range(self.micros):
                for node in self.source:
                    if node not in self.found.stage:
                        self._copy(node, m, 0)
            own = [self._at(divisor, m) for m in range(self.micros)]
            self.graph.output(signature.divisor, join_divisors(early, own))
        for number, action in enumerate(self.actions, 1):
            self._act(number, action)
        self._end()

    # ---- inputs

    def _inputs(self) -> None:
        held = self._parameters_here()
        split = batch_names(self.source, self.micros)
        for value in self.source.inputs:
            name, kind, role = value.name or "", type_of(value), role_of(value)
            assert role is not None
            if role is Role.PARAM:
                if name in held and held[name] not in {v.name for v in self.shared.values()}:
                    self.shared[value] = self.graph.input(held[name], kind, role)
                elif name in held:
                    self.shared[value] = self.graph.find_input(held[name])
            elif name in split:
                for m, own in enumerate(split[name]):
                    made = self.graph.input(own, kind.specialized(self.sizes[m]), role)
                    self.made[value, m] = made
            else:
                self.shared[value] = self.graph.input(name, kind, role)
        self._offsets()

    def _parameters_here(self) -> dict[str, str]:
        """By the input of a stage on this rank, the parameter."""
        inputs = self.staged.inputs.items()
        return {name: held for (held, s), name in inputs if s % self.ranks == self.rank}

    def _offsets(self) -> None:
        """Numbers the samples of each micro-batch behind those of the ones before."""
        name = self.source.signature.sample_offset
        if name is None:
            return
        value = self.source.find_input(name)
        b, offset = Builder(self.graph, marks={"action": 0}), self.shared[value]
        for m in range(self.micros):
            self.made[value, m] = offset
            if m + 1 == self.micros:
                break
            offset = b.Add(offset, b.squeeze(b.size(self.sizes[m][self.rows]), [0]))

    # ---- copies

    def _at(self, value: Value, m: int) -> Value:
        """A value of the micro-batch's graph in that of the rank."""
        array = array_of(value)
        if array is not None:
            return self.graph.constant(array)
        found = self.made.get((value, m), self.shared.get(value))
        assert found is not None, f"{value.name} of micro-batch {m} is not on rank {self.rank}"
        return found

    def _copy(self, node: Node, m: int, action: int) -> None:
        outputs: list[Value] = []
        for y in node.outputs:
            twin = Value(name=f"{y.name}.{m}")
            twin.meta.update(y.meta)
            twin.meta["type"] = type_of(y).specialized(self.sizes[m])
            content = y.meta.get("content")
            if content is not None:
                twin.meta["content"] = tuple(substitute(n, self.sizes[m]) for n in content)
            outputs.append(twin)
            self.made[y, m] = twin
        inputs = [None if x is None else self._at(x, m) for x in node.inputs]
        made = Node(
            node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs,
            name=f"{node.name}.{m}", metadata_props=dict(node.metadata_props),
        )  # fmt: skip
        made.meta.update({k: v for k, v in node.meta.items() if k != "stage"})
        made.meta["action"] = action
        self.graph.ir.append(made)

    # ---- actions

    def _act(self, number: int, action: Action) -> None:
        b = Builder(self.graph, None, f"stage.{action.stage}", marks={"action": number})
        b.backward = action.part is not Part.FORWARD
        mine = [m for m in self.messages if m.source == self.rank and m.sent == action]
        self._receive(b, number, mine)
        for message in self._delivered(action):
            self._end_send(b, message)
        for message in self.messages:
            if message.target == self.rank and message.needed == action:
                self._arrive(b, message)
        m = action.micro
        nodes = self.found.nodes(action.stage, *_PARTS[action.part])
        due = self._due_gradients(action, set(nodes))
        for node in nodes:
            self._copy(node, m, number)
            for name in due.pop(node, ()):
                self._add_gradient(b, name, m)
        for name in (name for names in due.values() for name in names):
            self._add_gradient(b, name, m)
        for message in mine:
            self._receive_before(b, message.number)
            x = self._at(message.value, m)
            token = b.one(SEND, [x], self._said(message) | {"to": message.target})
            start = token.producer()
            assert start is not None
            self.sent[message.number] = start

    def _said(self, message: Message) -> dict[str, object]:
        return {
            "axis": AXIS, "size": self.ranks, "sequence": message.number, "record": message.record
        }  # fmt: skip

    def _receive(self, b: Builder, number: int, mine: Sequence[Message]) -> None:
        """Starts to receive what this action reads, and what the next one reads unless a message
        that this one sends comes first."""
        first = mine[0].number if mine else len(self.messages) + 1
        for i, before in ((number - 1, len(self.messages) + 1), (number, first)):
            if i < len(self.actions):
                due = [m.number for m in self._expected() if m.needed == self.actions[i]]
                last = max((n for n in due if n < before), default=0)
                self._receive_before(b, last + 1)

    def _expected(self) -> list[Message]:
        here = [m for m in self.messages if m.target == self.rank]
        return [m for m in here if m.number not in self.received]

    def _receive_before(self, b: Builder, number: int) -> None:
        """Starts to receive all messages with lower numbers, in their order."""
        for message in self._expected():
            if message.number >= number:
                break
            kind = type_of(message.value).specialized(self.sizes[message.sent.micro])
            attrs = self._said(message) | {"source": message.source, "placed": 1}
            attrs["dtype"] = int(kind.dtype)
            self.received[message.number] = b.one(RECEIVE, [b.sizes(kind.shape)], attrs)

    def _arrive(self, b: Builder, message: Message) -> None:
        attrs = {k: v for k, v in self._said(message).items() if k != "size"}
        result = b.one(WAIT, [self.received[message.number]], attrs)
        self.made[message.value, message.sent.micro] = result

    def _delivered(self, action: Action | None) -> list[Message]:
        """The messages of this rank that have been read before this action starts, on paper; all
        of them at the end."""
        starts = self.timeline.starts
        return [
            m for m in self.messages
            if m.number in self.sent
            and (action is None or starts[m.needed] < starts[action])
        ]  # fmt: skip

    def _end_send(self, b: Builder, message: Message) -> None:
        start = self.sent.pop(message.number)
        attrs = {k: v for k, v in self._said(message).items() if k != "size"}
        token = b.one(WAIT, [start.outputs[0], *held_inputs(start)], attrs)
        name = self.graph.output(f"sent.{message.number}", token)
        signature = self.graph.signature
        self.graph.signature = signature.but(sent={str(message.number): name})

    # ---- gradients and loss

    def _due_gradients(self, action: Action, nodes: set[Node]) -> dict[Node | None, list[str]]:
        """The inputs whose gradients this action makes, by the node that makes them, behind which
        they are added: what comes earliest can be exchanged with other ranks first."""
        found: dict[Node | None, list[str]] = {}
        for (_, stage), name in self.staged.inputs.items():
            value = self.found.gradients.get(name)
            if stage != action.stage or value is None:
                continue
            maker = value.producer()
            whole = action_of(Part.WEIGHT, stage, action.micro, set(self.actions))
            if maker in nodes or (maker not in self.found.stage and action == whole):
                found.setdefault(maker, []).append(name)
        return found

    def _add_gradient(self, b: Builder, name: str, m: int) -> None:
        """Adds the gradient of a micro-batch to that of those before, in f32 where they are of
        fewer bytes."""
        x = self._at(_unrounded(self.found.gradients[name], self.found), m)
        wide = b.cast(x, type_of(x).accumulated.dtype) if self.micros > 1 else x
        held = self.totals.get(name)
        self.totals[name] = wide if held is None else b.Add(held, wide)

    def _end(self) -> None:
        b = Builder(self.graph, module="pipeline", backward=True)
        for message in self._delivered(None):
            self._end_send(b, message)
        signature, gradients = self.source.signature, dict[str, str]()
        parameters = self._parameters_here()
        stages = {name: stage for (_, stage), name in self.staged.inputs.items()}
        for parameter in dict.fromkeys(parameters.values()):
            own = [n for n in parameters if parameters[n] == parameter and n in self.totals]
            if own:  # the last stage first, as one walk over the whole graph adds
                own.sort(key=stages.__getitem__, reverse=True)
                total = self.totals[own[0]]
                for name in own[1:]:
                    total = b.Add(total, self.totals[name])
                total = b.cast(total, type_of(self.graph.find_input(parameter)).dtype)
                gradients[parameter] = self.graph.output(f"grad.{parameter}", total)
        here = {v.name or "" for v in self.graph.inputs}
        self._loss(b)
        made = self.graph.signature
        self.graph.signature = signature.within(here, self.graph.outputs).but(
            gradients=gradients, sent=made.sent
        )

    def _loss(self, b: Builder) -> None:
        """The sum of the losses of the micro-batches, under all names of the loss."""
        name = self.source.signature.loss
        assert name is not None
        value = self.source.outputs[name]
        maker = value.producer()
        stage = self.found.stage[maker] if maker is not None else 0
        if stage % self.ranks != self.rank:
            total = b.full(0, type_of(value))
        else:
            total = self._at(value, 0)
            for m in range(1, self.micros):
                total = b.Add(total, self._at(value, m))
        for other, held in self.source.outputs.items():
            if held is value:
                self.graph.output(other, total)


def _unrounded(value: Value, found: Partition) -> Value:
    """A gradient before it is cast to its parameter's type, so that sums are rounded once."""
    maker = value.producer()
    if maker is not None and maker.op_type == "Cast" and type_of(value).is_low:
        wide = maker.inputs[0]
        source = None if wide is None else wide.producer()
        if source in found.stage and type_of(wide).dtype == type_of(value).accumulated.dtype:
            assert wide is not None
            return wide
    return value


__all__ = ["AXIS", "JoinDivisors", "RankProgram", "batch_names", "micro_symbols", "rows_of",
           "write_rank"]  # fmt: skip
