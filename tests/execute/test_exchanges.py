"""Collectives in a plan, run by two processes over Gloo: the results of the lockstep evaluator, bit
for bit, since a sum of two numbers has one order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from exchange_program import AXIS, CASES, MESSAGES, RANKS, RUNS, SEVERAL, feeds, graph_of, run

from onward.distribute import lockstep, ranks_of
from onward.errors import OnwardError
from onward.execute import Executable, Memory, ProcessMesh
from onward.plan import make_plan


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


def test_without_processes_a_plan_with_collectives_is_refused() -> None:
    mesh = ranks_of((AXIS,), (RANKS,))[0]
    plan = make_plan(graph_of(mesh), {})
    with pytest.raises(OnwardError, match=f"no process group runs along the axis {AXIS}; fix"):
        Executable(plan, Memory(torch.device("cpu")), {}, mesh=mesh).bind()
    with pytest.raises(OnwardError, match=r"needs torch\.distributed; fix: start the program"):
        ProcessMesh({AXIS: RANKS})
