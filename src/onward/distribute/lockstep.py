"""Evaluates the graphs of all ranks of a mesh together, in one process, as an oracle.

Each graph is cut where it waits for a collective. The pieces run on onnx's reference evaluator
(numpy; slow and exact); the collectives between them are functions of the arrays of the ranks that
meet, reduced in the order of the ranks' coordinates: ((x0 + x1) + x2) + ... A message from one rank
to another does not stop either of them until they wait for it (`pair_streams`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from onward.distribute.mesh import Mesh
from onward.distribute.pair_streams import MessageEnd, PairStreams
from onward.errors import OnwardError
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Node, Role, Value, array_of, attributes, type_of
from onward.graph.ops.collective import MESSAGES, SEND, STARTS, WAIT, start_of
from onward.graph.printer import node_text

Arrays: TypeAlias = list[np.ndarray]
Outputs: TypeAlias = dict[str, np.ndarray]


@dataclass(frozen=True)
class Meeting:
    """A rank that has come to the start of a collective, with the arrays that it brings."""

    start: Node
    arrays: Arrays

    @property
    def attrs(self) -> dict[str, Any]:
        return attributes(self.start)

    @property
    def terms(self) -> tuple[Any, ...]:
        """What all ranks that meet must have in common: op, attributes, shapes, element types."""
        said = sorted(pair for pair in self.attrs.items() if pair[0] != "partner")
        return (self.start.op_type, said, [(x.shape, x.dtype) for x in self.arrays])


@dataclass(frozen=True)
class Arrival:
    """A rank that waits for a message. start: of it."""

    start: Node


def ranks_of(axes: Sequence[str], sizes: Sequence[int]) -> list[Mesh]:
    """The meshes of all ranks, in the order of their numbers: the last axis has neighbours."""
    places = product(*(range(size) for size in sizes))
    return [Mesh(tuple(axes), tuple(sizes), place) for place in places]


def rank_on(sizes: Mapping[str, int], rank: int) -> Mesh:
    """The mesh of the rank of this number. sizes: by axis; without any it is one rank."""
    return ranks_of(tuple(sizes), tuple(sizes.values()))[rank]


def lockstep(
    meshes: Sequence[Mesh], graphs: Sequence[Graph], feeds: Sequence[Mapping[str, np.ndarray]]
) -> list[Outputs]:
    """Evaluates the graph of each rank; returns the outputs of each by name. feeds: every input by
    name, for each rank. Raises OnwardError that names a rank and a node where ranks meet at
    different collectives, or one waits for a rank that does not come."""
    runs = [_run(graph, given) for graph, given in zip(graphs, feeds, strict=True)]
    found: dict[int, Outputs] = {}
    waiting: dict[int, Meeting] = {}
    expecting: dict[int, Arrival] = {}
    streams = PairStreams()

    def go_on(rank: int, arrays: Arrays) -> None:
        try:
            stop = runs[rank].send(arrays) if arrays else next(runs[rank])
            while isinstance(stop, MessageEnd):
                streams.start(rank, _other_end(meshes, rank, stop), stop)
                stop = next(runs[rank])
        except StopIteration as end:
            found[rank] = end.value
            return
        if isinstance(stop, Arrival):
            expecting[rank] = stop
        else:
            waiting[rank] = stop

    for rank in range(len(runs)):
        go_on(rank, [])
    while waiting or expecting:
        arrived = [
            (rank, result) for rank, stop in expecting.items()
            if (result := streams.finished(rank, _sender(meshes, rank, stop), stop.start))
            is not None
        ]  # fmt: skip
        for rank, result in arrived:
            del expecting[rank]
            go_on(rank, [result])
        if arrived:
            continue
        group = next((g for r in waiting if (g := _group(meshes, waiting, r))), None)
        if group is None:
            raise OnwardError(_stuck(meshes, waiting, expecting))
        met = [waiting.pop(rank) for rank in group]
        first = met[0]
        for rank, other in zip(group, met, strict=True):
            if other.terms != first.terms:
                raise OnwardError(
                    f"rank {group[0]} is at {node_text(first.start)}, but rank {rank} along "
                    f"{first.attrs['axis']} is at {node_text(other.start)}"
                )
        results = [_exchanged(met, place) for place in range(len(met))]
        for rank, arrays in zip(group, results, strict=True):
            go_on(rank, arrays)
    return [found[rank] for rank in range(len(runs))]


def _neighbours(meshes: Sequence[Mesh], rank: int, axis: str) -> list[int]:
    """The ranks that differ from this one along an axis alone, in the order of their
    coordinates."""
    at = meshes[rank].axes.index(axis)

    def others(mesh: Mesh) -> tuple[int, ...]:
        return (*mesh.coordinates[:at], *mesh.coordinates[at + 1 :])

    same = [r for r, mesh in enumerate(meshes) if others(mesh) == others(meshes[rank])]
    return sorted(same, key=lambda r: meshes[r].coordinates[at])


def _other_end(meshes: Sequence[Mesh], rank: int, end: MessageEnd) -> int:
    """The rank at the other end of a message."""
    return _neighbours(meshes, rank, end.attrs["axis"])[end.other]


def _sender(meshes: Sequence[Mesh], rank: int, stop: Arrival) -> int:
    return _other_end(meshes, rank, MessageEnd(stop.start, None))


def _members(meshes: Sequence[Mesh], meeting: Meeting, rank: int) -> list[int]:
    """The ranks that take part in this rank's collective."""
    group = _neighbours(meshes, rank, meeting.attrs["axis"])
    partner = meeting.attrs.get("partner")
    return group if partner is None else sorted({rank, group[int(partner)]})


def _group(meshes: Sequence[Mesh], waiting: Mapping[int, Meeting], rank: int) -> list[int] | None:
    """The ranks that meet at this rank's collective, if all of them wait at one along its axis."""
    axis = waiting[rank].attrs["axis"]
    group = _members(meshes, waiting[rank], rank)
    there = all(r in waiting and waiting[r].attrs["axis"] == axis for r in group)
    return group if there else None


def _stuck(
    meshes: Sequence[Mesh], waiting: Mapping[int, Meeting], expecting: Mapping[int, Arrival]
) -> str:
    if expecting:
        rank, stop = next(iter(expecting.items()))
        start, other = stop.start, _sender(meshes, rank, stop)
    else:
        rank, meeting = next(iter(waiting.items()))
        start, at = meeting.start, meeting.attrs["axis"]
        group = _members(meshes, meeting, rank)
        other = next(r for r in group if r not in waiting or waiting[r].attrs["axis"] != at)
    stop = waiting.get(other) or expecting.get(other)
    where = "has ended" if stop is None else f"is at {node_text(stop.start)}"
    return f"rank {rank} waits at {node_text(start)}, but rank {other} {where}"


# ---- the collectives


def _exchanged(met: Sequence[Meeting], place: int) -> Arrays:
    """The results of the rank at this place among those that meet."""
    attrs, xs = met[place].attrs, [meeting.arrays for meeting in met]
    match met[place].start.op_type:
        case "AllReduceStart":
            return [_reduced(list(each), attrs["reduction"]) for each in zip(*xs, strict=True)]
        case "BroadcastStart":
            return [x.copy() for x in xs[int(attrs["root"])]]
        case "AllGatherStart":
            whole = np.concatenate([x for x, *_ in xs])
            _, *into = xs[place]
            return [whole.reshape(into[0].shape) if into else whole]
        case "ReduceScatterStart":
            parts = [_part(x, place, len(xs)) for (x,) in xs]
            return [_reduced(parts, attrs["reduction"])]
        case "AllToAllStart":
            return [np.concatenate([_part(x, place, len(xs)) for (x,) in xs])]
        case "ExchangeStart" if "partner" in attrs:
            [x] = xs[1 - place]
            return [x.copy()]
        case "ExchangeStart" if "shift" in attrs:
            [x] = xs[(place - int(attrs["shift"])) % len(xs)]
            return [x.copy()]
        case "ExchangeStart":
            [x] = xs[place ^ int(attrs["distance"])]
            return [x.copy()]
        case op:
            raise AssertionError(f"no collective: {op}")


def _part(x: np.ndarray, place: int, parts: int) -> np.ndarray:
    return np.split(x, parts)[place]


def _reduced(xs: Sequence[np.ndarray], reduction: str) -> np.ndarray:
    total = xs[0].copy()
    for x in xs[1:]:
        total = np.maximum(total, x) if reduction == "max" else (total + x).astype(total.dtype)
    return total if reduction != "mean" else (total / len(xs)).astype(total.dtype)


# ---- one rank


def _run(
    graph: Graph, feeds: Mapping[str, np.ndarray]
) -> Generator[Meeting | MessageEnd | Arrival, Arrays, Outputs]:
    """Runs the graph of one rank; yields at the start of each collective, in the order of the
    graph, and is sent its results. Of a message it yields the start, and where it waits for it."""
    known: dict[Value, np.ndarray] = {v: feeds[v.name or ""] for v in graph.inputs}
    known |= {
        v: array for v in graph.ir.initializers.values() if (array := array_of(v)) is not None
    }
    piece: list[Node] = []
    for node in graph:
        if node.op_type in MESSAGES:
            _evaluate(piece, known, graph)
            piece = []
            x = node.inputs[0]
            yield MessageEnd(node, None if x is None or node.op_type != SEND else known[x])
        elif node.op_type == WAIT and start_of(node).op_type in MESSAGES:
            _evaluate(piece, known, graph)
            piece = []
            known.update(zip(node.outputs, (yield Arrival(start_of(node))), strict=True))
        elif node.op_type in STARTS:
            _evaluate(piece, known, graph)
            piece = []
            results = yield Meeting(node, [known[x] for x in node.inputs if x is not None])
            known.update(zip(node.outputs, results, strict=True))
        elif node.op_type == WAIT:
            arrived = zip(node.outputs, node.inputs, strict=False)
            known.update({y: known[x] for y, x in arrived if x is not None})
        else:
            piece.append(node)
    _evaluate(piece, known, graph)
    return {name: known[value] for name, value in graph.outputs.items()}


def _evaluate(nodes: Sequence[Node], known: dict[Value, np.ndarray], graph: Graph) -> None:
    """Evaluates nodes whose inputs are known or made by them; adds to `known` what others read."""
    if not nodes:
        return
    piece = Graph("piece")
    copies: dict[Value, Value] = {}

    def copied(value: Value) -> Value:
        if value not in copies:
            array = array_of(value)
            if array is not None:
                copies[value] = piece.constant(array)
            else:
                copies[value] = piece.input(value.name or "", type_of(value), Role.BATCH)
                copies[value].meta.update(value.meta)
        return copies[value]

    for node in nodes:
        inputs = [None if x is None else copied(x) for x in node.inputs]
        outputs = [Value(name=y.name) for y in node.outputs]
        for y, twin in zip(node.outputs, outputs, strict=True):
            twin.meta.update(y.meta)
            copies[y] = twin
        piece.ir.append(
            Node(
                node.domain, node.op_type, inputs, list(node.attributes.values()),
                outputs=outputs, name=node.name,
            )
        )  # fmt: skip
    inside, ends = set(nodes), graph.output_values()
    read = [
        y for n in nodes for y in n.outputs
        if y in ends or any(reader not in inside for reader in y.consumers())
    ]  # fmt: skip
    piece.outputs = {f"y{i}": copies[y] for i, y in enumerate(read)}
    feeds = {copies[v].name or "": array for v, array in known.items() if v in copies}
    made = evaluate(piece, feeds)
    known.update({y: made[f"y{i}"] for i, y in enumerate(read)})


__all__ = ["Arrival", "Meeting", "lockstep", "rank_on", "ranks_of"]
