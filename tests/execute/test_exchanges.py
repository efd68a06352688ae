"""Collectives in a plan, run by two processes over Gloo: the results of the lockstep evaluator, bit
for bit, since a sum of two numbers has one order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exchange_program import AXIS, CASES, MESSAGES, RANKS, RUNS, SEVERAL, feeds, graph_of, run

from onward.distribute import lockstep, ranks_of
from onward.errors import OnwardError
from onward.execute import Executable, Memory, ProcessMesh
from onward.graph.ops.collective import WAIT
from onward.kernels import KERNELS, KernelArguments, RankGroups
from onward.plan import make_plan


class Ended:
    """An exchange that has ended."""

    def wait(self) -> None:
        pass


@pytest.mark.slow
def test_two_processes_over_gloo(tmp_path: Path) -> None:
    found = run(tmp_path)
    meshes = ranks_of((AXIS,), (RANKS,))
    for number in range(RUNS):
        given = [feeds(rank, number) for rank in range(RANKS)]
        want = lockstep(meshes, [graph_of(mesh) for mesh in meshes], given)
        for rank in range(RANKS):
            for name, y in want[rank].items():
                # Tanh is another one in numpy; a send has no result
                if name != "work" and not name.startswith("sent"):
                    np.testing.assert_array_equal(found[rank][f"{number}.{name}"], y)
    several = sum(case[0] in SEVERAL for case in CASES)
    mixed = 2  # small tensors beside large ones
    assert len(found[0]) == RUNS * (1 + len(CASES) + several + mixed + len(MESSAGES) + 1)


def test_a_buffer_is_the_next_exchanges_once_it_has_been_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two exchanges of one size are under way, each in a buffer of its own."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: Ended())
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    ranks = RankGroups({AXIS: object()})

    def launch(op: str, number: int) -> None:
        attrs = {"axis": AXIS, "sequence": number, "reduction": "sum", "size": 2, "record": "g"}
        args = KernelArguments(attrs, [torch.ones(4)], [torch.ones(2)], [], ranks=ranks)
        KERNELS[op][0].bind(args)()

    def buffer(number: int) -> int:
        whole = ranks.pending[number].whole
        assert whole is not None
        return whole.data_ptr()

    launch("ReduceScatterStart", 1)
    launch("ReduceScatterStart", 2)
    first = buffer(1)
    assert first != buffer(2)
    launch(WAIT, 1)
    launch("ReduceScatterStart", 3)
    assert buffer(3) == first


def test_without_processes_a_plan_with_collectives_is_refused() -> None:
    mesh = ranks_of((AXIS,), (RANKS,))[0]
    plan = make_plan(graph_of(mesh), {})
    with pytest.raises(OnwardError, match=f"no process group runs along the axis {AXIS}; fix"):
        Executable(plan, Memory(torch.device("cpu")), {}, mesh=mesh).bind()
    with pytest.raises(OnwardError, match=r"needs torch\.distributed; fix: start the program"):
        ProcessMesh({AXIS: RANKS})
