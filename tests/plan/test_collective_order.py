"""The order of collectives in a plan is that of their numbers, whatever the sizes; their memory is
kept from the start to the wait; ranks compare sequences by a hash."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from onward.distribute import Collectives, Mesh
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value
from onward.graph.ops.collective import STARTS, WAIT
from onward.graph.types import parse_type
from onward.kernels import host
from onward.plan import Plan, collectives, make_plan, sequence_hash, sequence_text
from onward.plan.estimate import MemoryEstimate
from onward.plan.order import order, sort
from onward.plan.select import select

PAIR = Mesh(("tp",), (2,), (0,))


def backward(rows: Sequence[int], shuffled: int | None = None) -> Graph:
    """A chain of products with a gradient at each, all-reduced in the order of the chain; shuffled:
    seed by which the collectives' nodes stand in another order."""
    graph = Graph()
    x = graph.input("x", parse_type("f32[8,8]"), Role.BATCH)
    b = Builder(graph, backward=True)
    exchange = Collectives(graph, PAIR)
    made: list[tuple[Value, int]] = []
    value: Value = x
    for i, n in enumerate(rows):
        value = b.Tanh(b.MatMul(value, x))
        made.append((b.MatMul(b.const(np.ones((n, 8), np.float32)), value), i))
    started = [exchange.start(b, "AllReduceStart", [g], "tp", f"g{i}", reduction="sum")
               for g, i in made]  # fmt: skip
    if shuffled is not None:
        starts = [s.start for s in started if s.start is not None]
        random.Random(shuffled).shuffle(starts)
        graph.ir.remove(starts)
        graph.ir.extend(starts)
    for i, exchanged in enumerate(started):
        graph.output(f"g{i}", exchanged.wait(b)[0])
    graph.output("value", value)
    return graph


def numbers(plan: Plan) -> list[int]:
    return [int(launch.attrs["sequence"]) for launch in collectives(plan)]


@pytest.mark.parametrize("seed", range(8))
def test_the_order_is_that_of_the_numbers_whatever_the_shapes(seed: int) -> None:
    draw = random.Random(seed)
    hashes = set()
    for shuffled in (None, seed):
        plan = make_plan(backward([draw.randint(1, 300) for _ in range(6)], shuffled), {})
        assert numbers(plan) == [1, 2, 3, 4, 5, 6]
        hashes.add(sequence_hash(plan))
    assert len(hashes) == 1, "sizes are no part of the sequence"


def test_starts_run_as_early_and_waits_as_late_as_they_can() -> None:
    plan = make_plan(backward([4] * 4), {})
    ops = [launch.op for launch in plan.launches]
    at = [i for i, op in enumerate(ops) if op in STARTS]
    waits = [i for i, op in enumerate(ops) if op == WAIT]
    assert max(at) < min(waits)
    assert all(ops[i - 1] not in STARTS for i in at), "each right behind its gradient"


def test_their_memory_is_kept_between_start_and_wait() -> None:
    """No launch between the two halves writes the bytes of a result, or of a held input."""
    graph = Graph()
    x = graph.input("x", parse_type("f32[64,8]"), Role.BATCH)
    b, exchange = Builder(graph), Collectives(graph, PAIR)
    twice = b.Mul(x, 2.0)
    started = [
        exchange.start(b, op, [b.Add(twice, float(i))], "tp", op, **more)
        for i, (op, more) in enumerate(
            [
                ("AllReduceStart", {"reduction": "sum"}),
                ("ReduceScatterStart", {"reduction": "sum"}),
                ("AllGatherStart", {}),
                ("AllToAllStart", {}),
                ("BroadcastStart", {"root": 0}),
                ("ExchangeStart", {"distance": 1}),
            ]
        )
    ]
    value = x
    for _ in range(6):
        value = b.Tanh(value)
    for i, one in enumerate(started):
        graph.output(f"y{i}", one.wait(b)[0])
    graph.output("value", value)
    plan = make_plan(graph, {})
    for begin, start in enumerate(plan.launches):
        if start.op not in STARTS:
            continue
        end = next(
            i for i, x in enumerate(plan.launches)
            if x.op == WAIT and x.attrs["sequence"] == start.attrs["sequence"]
        )  # fmt: skip
        held = {y.buffer for y in start.outputs}
        if start.op not in ("AllReduceStart", "BroadcastStart"):
            held |= {x.buffer for x in start.inputs if x is not None}
        for index in held:
            assert plan.buffers[index].first <= begin and plan.buffers[index].last >= end
        written = {y.buffer for x in plan.launches[begin + 1 : end] for y in x.outputs}
        assert not held & written


def test_a_collective_is_reduced_in_place() -> None:
    graph = Graph()
    x = graph.input("x", parse_type("f32[64,8]"), Role.BATCH)
    b = Builder(graph)
    [y] = Collectives(graph, PAIR).run(
        b, "AllReduceStart", [b.Mul(x, 2.0)], "tp", "y", reduction="sum"
    )
    graph.output("y", y)
    plan = make_plan(graph, {})
    assert len({launch.outputs[0].buffer for launch in plan.launches}) == 1


def test_the_hash_tells_sequences_apart() -> None:
    def plan(axis: str = "tp", record: str = "g", reduction: str = "sum", rows: int = 4) -> Plan:
        graph = Graph()
        x = graph.input("x", parse_type(f"f32[{rows},8]"), Role.BATCH)
        b, mesh = Builder(graph), Mesh(("tp", "cp"), (2, 2), (0, 0))
        exchange = Collectives(graph, mesh)
        [y] = exchange.run(b, "AllReduceStart", [x], axis, record, reduction=reduction)
        graph.output("y", y)
        return make_plan(graph, {})

    want = sequence_hash(plan())
    assert sequence_hash(plan(rows=6)) == want
    others = [plan(axis="cp"), plan(record="h"), plan(reduction="max")]
    assert len({want, *map(sequence_hash, others)}) == 4
    assert sequence_text(plan()) == (
        "AllReduceStart(float) {axis=tp, size=2, reduction=sum, sequence=1, record=g}\n"
    )


EXCHANGES: dict[str, dict[str, Any]] = {
    "AllReduceStart": {"reduction": "sum"}, "BroadcastStart": {"root": 0},
    "ReduceScatterStart": {"reduction": "sum", "dim": 0}, "AllGatherStart": {"dim": 0},
    "AllToAllStart": {"split_dim": 0, "concat_dim": 1}, "ExchangeStart": {"distance": 1},
}  # fmt: skip


@pytest.mark.parametrize("op", EXCHANGES)
def test_collectives_are_never_repeated_to_save_memory(op: str) -> None:
    graph = Graph()
    x = graph.input("x", parse_type("f32[64,8]"), Role.BATCH)
    b = Builder(graph)
    [y] = Collectives(graph, PAIR).run(b, op, [b.Mul(x, 2.0)], "tp", "y", **EXCHANGES[op])
    graph.output("z", Builder(graph, backward=True).Mul(b.Tanh(y), y))
    kernels = select(graph, host())
    sort(graph)
    memory = MemoryEstimate(graph, kernels)
    repeatable = {n.op_type for n, may in zip(memory.nodes, memory.repeatable, strict=True) if may}
    assert repeatable == {"Mul", "Tanh"}


@pytest.mark.parametrize("seed", range(60))
def test_what_is_ready_early_waits_for_its_turn(seed: int) -> None:
    """Numbers are given in an order other than that in which the exchanged values are computed."""
    draw = random.Random(seed)
    graph = Graph()
    x = graph.input("x", parse_type("f32[8,8]"), Role.BATCH)
    b, exchange = Builder(graph, backward=draw.random() < 0.7), Collectives(graph, PAIR)
    values = [x]
    for _ in range(draw.randint(3, 12)):
        a, other = draw.choice(values), draw.choice(values)
        values.append(draw.choice([b.Tanh, lambda v, w=other: b.MatMul(v, w)])(a))
    made = values[1:]
    draw.shuffle(made)
    started = [
        exchange.start(b, "AllReduceStart", [v], "tp", f"g{i}", reduction="sum")
        for i, v in enumerate(made[:6])
    ]
    for i, each in enumerate(started):
        graph.output(f"g{i}", each.wait(b)[0])
    graph.output("value", values[-1])
    assert numbers(make_plan(graph, {})) == list(range(1, len(started) + 1))


def test_a_collective_that_needs_a_later_one_is_refused() -> None:
    graph = Graph()
    x = graph.input("x", parse_type("f32[4]"), Role.BATCH)
    b, said = Builder(graph), {"axis": "tp", "size": 2, "record": "r", "reduction": "sum"}
    value: Value = x
    for number in (2, 1):
        made = b.AllReduceStart(value, **said, sequence=number)
        value = b.CollectiveWait(made, axis="tp", sequence=number, record="r")
    graph.output("y", value)
    with pytest.raises(ValueError, match=r"collective 1 .* needs the result of a later one"):
        order(graph)


def test_a_start_that_nothing_waits_for_before_its_turn() -> None:
    """A collective with a high number, ready at once, waits for those with lower ones."""
    graph = Graph()
    x = graph.input("x", parse_type("f32[4]"), Role.BATCH)
    b, said = Builder(graph), {"axis": "tp", "size": 2, "record": "r", "reduction": "sum"}
    late = b.AllReduceStart(x, **said, sequence=2)
    early = b.AllReduceStart(b.Tanh(x), **said, sequence=1)
    for number, made in ((2, late), (1, early)):
        graph.output(f"y{number}", b.CollectiveWait(made, axis="tp", sequence=number, record="r"))
    assert numbers(make_plan(graph, {})) == [1, 2]


def test_no_launch_runs_ahead_of_its_action() -> None:
    """A sum that frees memory, and could follow what it reads at once, is of a later action of a
    pipeline than the launch beside it."""
    for action, want in ((3, ["Exp", "Tanh", "ReduceSum"]), (1, ["Exp", "ReduceSum", "Tanh"])):
        graph = Graph()
        x = graph.input("x", parse_type("f32[64]"), Role.BATCH)
        read = Builder(graph, backward=True, marks={"action": 1}).Exp(x)
        graph.output("beside", Builder(graph, backward=True, marks={"action": 2}).Tanh(x))
        last = Builder(graph, backward=True, marks={"action": action})
        graph.output("sum", last.ReduceSum(read, keepdims=0))
        assert [node.op_type for node in order(graph)] == want
