"""One of two processes that run the collectives of a plan over Gloo, and what each of them is
given; `run` starts both and returns their results."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rank_processes import run_ranks

from onward.distribute import Collectives, Mesh
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value
from onward.graph.types import DType, parse_type

RANKS, RUNS = 2, 3
AXIS = "dp_shard"
LOW = DType.BFLOAT16
# op, attributes, type of x, whether x is not contiguous; several tensors where the op takes them
CASES: tuple[tuple[str, dict[str, Any], str, bool], ...] = (
    ("AllReduceStart", {"reduction": "sum"}, "f32[6,5]", False),
    ("AllReduceStart", {"reduction": "mean"}, "f32[6,5]", True),
    ("AllReduceStart", {"reduction": "max"}, "f64[3]", False),
    ("AllReduceStart", {"reduction": "sum"}, "i64[]", False),
    ("AllReduceStart", {"reduction": "mean"}, "f32[512,520]", False),  # more than 1 MiB
    ("ReduceScatterStart", {"reduction": "sum"}, "f32[6,5]", True),
    ("ReduceScatterStart", {"reduction": "mean"}, "f64[4]", False),
    ("AllGatherStart", {}, "f32[3,5]", True),
    ("AllToAllStart", {}, "f32[4,5]", True),
    ("BroadcastStart", {"root": 1}, "f32[6,5]", False),
    ("ExchangeStart", {"distance": 1}, "f32[6,5]", True),
    ("ExchangeStart", {"distance": 1}, "f64[3]", False),
    ("ExchangeStart", {"distance": 1}, "f16[2,5]", False),
    ("ExchangeStart", {"shift": 1}, "f32[6,5]", True),
)
MESSAGES = ("f32[6,5]", "bf16[6,5]", "i64[3]", "b[7]")  # from rank 0 to rank 1, and back
SEVERAL = ("AllReduceStart", "BroadcastStart")


def graph_of(mesh: Mesh) -> Graph:
    """All collectives start before the first is waited for; launches between them would overwrite
    memory that the plan did not keep."""
    graph = Graph()
    b, exchange = Builder(graph, backward=True), Collectives(graph, mesh)
    started = []
    few: Any = None
    for i, (op, attrs, kind, turned) in enumerate(CASES):
        x = graph.input(f"x{i}", parse_type(kind), Role.BATCH)
        value: Value = b.Add(x, x)
        few = x if i == 0 else few
        if turned:
            shape = parse_type(kind).shape
            flat = b.reshape(value, (shape[1], shape[0]))
            value = b.transpose(flat, (1, 0))
        several = [value, b.Mul(x, x)] if op in SEVERAL else [value]
        if kind == "f32[512,520]":  # beside small tensors, which are summed together
            several += [b.Add(few, few), b.Mul(few, few)]
        started.append(exchange.start(b, op, several, AXIS, f"case {i}", **attrs))
    _send_messages(graph, b, mesh, len(CASES) + 1)
    work = graph.input("work", parse_type("f32[64,8]"), Role.BATCH)
    value = work
    for _ in range(4):
        value = b.Tanh(b.Add(value, work))
    graph.output("work", value)
    for i, one in enumerate(started):
        for j, y in enumerate(one.wait(b)):
            graph.output(f"y{i}.{j}", b.Neg(y))
    return graph


def _send_messages(graph: Graph, b: Builder, mesh: Mesh, number: int) -> None:
    """Sends each message on one rank and receives it on the other, and waits for all of them
    later."""
    rank, ends, sent = mesh.coordinate(AXIS), list[tuple[str, Value, Any, list[Value]]](), {}
    for i, kind in enumerate(MESSAGES):
        x = graph.input(f"m{i}", parse_type(kind), Role.BATCH)
        for source in range(RANKS):
            record = f"message {i} of rank {source}"
            said = {"axis": AXIS, "size": RANKS, "sequence": number, "record": record}
            number += 1
            if rank == source:
                token = b.one("SendStart", [x], {**said, "to": 1 - rank})
                ends.append((f"sent.{i}", token, said, [x]))
            else:
                attrs = {**said, "source": source, "dtype": int(parse_type(kind).dtype)}
                y = b.one("ReceiveStart", [b.shape(x)], attrs)
                ends.append((f"received.{i}", y, said, []))
    y = b.one("ExchangeStart", [x := graph.input("p", parse_type("f32[2,5]"), Role.BATCH)],
              {"axis": AXIS, "size": RANKS, "sequence": number, "record": "p", "partner": 1 - rank}
              )  # fmt: skip
    ends.append(("partner", y, {"axis": AXIS, "sequence": number, "record": "p"}, [x]))
    for name, y, said, held in ends:
        attrs = {key: said[key] for key in ("axis", "sequence", "record")}
        made = b.one("CollectiveWait", [y, *held], attrs)
        if name.startswith("sent"):
            sent[name] = graph.output(name, made)
        else:
            graph.output(name, b.cast(made, DType.FLOAT))
    graph.signature = graph.signature.but(sent=sent)


def feeds(rank: int, run: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(10 * run + rank)
    given = {"work": rng.standard_normal((64, 8)).astype(np.float32)}
    for i, (_, _, kind, _) in enumerate(CASES):
        type = parse_type(kind)
        drawn = 4 * rng.standard_normal([int(n) for n in type.shape])  # type: ignore[arg-type]
        given[f"x{i}"] = np.asarray(drawn).astype(type.dtype.numpy())
    for i, kind in enumerate((*MESSAGES, "f32[2,5]")):
        type = parse_type(kind)
        drawn = 4 * rng.standard_normal([int(n) for n in type.shape])  # type: ignore[arg-type]
        name = f"m{i}" if i < len(MESSAGES) else "p"
        given[name] = np.asarray(drawn > 0 if kind[0] == "b" else drawn).astype(type.dtype.numpy())
    return given


def run(folder: Path) -> list[dict[str, np.ndarray]]:
    """The results of each rank: outputs by the number of the run and name."""
    run_ranks(__file__, [str(folder)], RANKS)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(RANKS)]


def main(folder: Path, rank: int) -> None:
    import torch
    from torch import distributed

    from onward.errors import OnwardError
    from onward.execute import Executable, Memory, ProcessMesh
    from onward.plan import make_plan

    torch.set_num_threads(1)
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    mesh = ProcessMesh({AXIS: RANKS})
    assert (mesh.coordinates, mesh.ranks) == ((rank,), RANKS)
    try:
        ProcessMesh({AXIS: 3})
    except OnwardError as error:
        assert "has 3 ranks, but torch.distributed has 2 processes; fix" in str(error)
    else:
        raise AssertionError("a mesh of more ranks than processes")
    assert mesh.agreed(True) and not mesh.agreed(rank == 0) and not mesh.agreed(False)

    plan, memory = make_plan(graph_of(mesh), {}), Memory(torch.device("cpu"))
    executable = Executable(plan, memory, {}, mesh=mesh)
    made: dict[str, np.ndarray] = {}
    for number in range(RUNS):
        given = feeds(rank, number)
        low = {n: x.astype(np.float32) for n, x in given.items() if x.dtype == LOW.numpy()}
        inputs = {n: torch.from_numpy(x) for n, x in given.items() if n not in low}
        inputs |= {n: torch.from_numpy(x).bfloat16() for n, x in low.items()}
        executable.run(inputs)
        for name in (n for n in executable.plan.outputs if not n.startswith("sent")):
            made[f"{number}.{name}"] = executable.output(name).numpy()
    distributed.barrier()
    np.savez(folder / f"{rank}.npz", **made)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
