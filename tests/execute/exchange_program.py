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
from onward.graph.types import parse_type

RANKS, RUNS = 2, 3
AXIS = "dp_shard"
# op, attributes, type of x, whether x is not contiguous; several tensors where the op takes them
CASES: tuple[tuple[str, dict[str, Any], str, bool], ...] = (
    ("AllReduceStart", {"reduction": "sum"}, "f32[6,5]", False),
    ("AllReduceStart", {"reduction": "mean"}, "f32[6,5]", True),
    ("AllReduceStart", {"reduction": "max"}, "f64[3]", False),
    ("AllReduceStart", {"reduction": "sum"}, "i64[]", False),
    ("ReduceScatterStart", {"reduction": "sum"}, "f32[6,5]", True),
    ("ReduceScatterStart", {"reduction": "mean"}, "f64[4]", False),
    ("AllGatherStart", {}, "f32[3,5]", True),
    ("AllToAllStart", {}, "f32[4,5]", True),
    ("BroadcastStart", {"root": 1}, "f32[6,5]", False),
    ("ExchangeStart", {"distance": 1}, "f32[6,5]", True),
    ("ExchangeStart", {"distance": 1}, "f64[3]", False),
    ("ExchangeStart", {"distance": 1}, "f16[2,5]", False),
)
SEVERAL = ("AllReduceStart", "BroadcastStart")


def graph_of(mesh: Mesh) -> Graph:
    """All collectives start before the first is waited for; launches between them would overwrite
    memory that the plan did not keep."""
    graph = Graph()
    b, exchange = Builder(graph, backward=True), Collectives(graph, mesh)
    started = []
    for i, (op, attrs, kind, turned) in enumerate(CASES):
        x = graph.input(f"x{i}", parse_type(kind), Role.BATCH)
        value: Value = b.Add(x, x)
        if turned:
            shape = parse_type(kind).shape
            flat = b.reshape(value, (shape[1], shape[0]))
            value = b.transpose(flat, (1, 0))
        several = [value, b.Mul(x, x)] if op in SEVERAL else [value]
        started.append(exchange.start(b, op, several, AXIS, f"case {i}", **attrs))
    work = graph.input("work", parse_type("f32[64,8]"), Role.BATCH)
    value = work
    for _ in range(4):
        value = b.Tanh(b.Add(value, work))
    graph.output("work", value)
    for i, one in enumerate(started):
        for j, y in enumerate(one.wait(b)):
            graph.output(f"y{i}.{j}", b.Neg(y))
    return graph


def feeds(rank: int, run: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(10 * run + rank)
    given = {"work": rng.standard_normal((64, 8)).astype(np.float32)}
    for i, (_, _, kind, _) in enumerate(CASES):
        type = parse_type(kind)
        drawn = 4 * rng.standard_normal([int(n) for n in type.shape])  # type: ignore[arg-type]
        given[f"x{i}"] = np.asarray(drawn).astype(type.dtype.numpy())
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
        inputs = {name: torch.from_numpy(x) for name, x in feeds(rank, number).items()}
        executable.run(inputs)
        for name in executable.plan.outputs:
            made[f"{number}.{name}"] = executable.output(name).numpy()
    distributed.barrier()
    np.savez(folder / f"{rank}.npz", **made)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
