"""What a rank of a pipeline keeps: values that backward computes again make the same bits; by the
lockstep evaluator."""

from __future__ import annotations

import meshed_pipelines as meshed
import numpy as np
import pipelined_steps as pipes
import pytest
import sharded_steps as steps

from onward import rewrite
from onward.distribute import lockstep
from onward.graph.graph import Graph, attributes
from onward.graph.ops.collective import STARTS, WAIT, broken_halves, sequence_of
from onward.kernels import host
from onward.plan import Budget, make_plan
from onward.plan.order import sort
from onward.rewrite import specialize

pytestmark = pytest.mark.usefixtures("captures_kept")
DIMS = {"B.0": 2, "B.1": 2, "T": steps.LENGTH}


def exchanges(graph: Graph) -> list[tuple[int, str, str]]:
    """What a rank exchanges, by numbers."""
    found = [n for n in graph if n.op_type in STARTS or n.op_type == WAIT]
    return sorted((sequence_of(n), n.op_type, attributes(n)["record"]) for n in found)


@pytest.mark.parametrize("name", ["GPipe", "InterleavedZeroBubble"])
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_recomputed_values(sizes: dict[str, int], name: str) -> None:
    """The least memory that there is: ranks compute values again, and receive none of them again;
    all ranks make the same bits."""
    model = steps.made("gpt2", layers=2)
    cut, meshes = pipes.cut_of(model, 2, name, 2), meshed.meshes_of(sizes)
    graphs = meshed.graphs_of(model, meshes, pipes.recipe_for(model, cut))
    before: list[Graph] = []
    after: list[Graph] = []
    for graph in graphs:
        graph = specialize(graph, DIMS, (), graph.signature.requested((), True))
        plan = make_plan(graph, DIMS)
        budget = Budget(graph, plan, 0.01, host())
        for proposed, values in budget.proposals():
            rewrite.recompute(proposed, values)
            budget.judge(make_plan(proposed, DIMS), proposed, None)
        sort(graph)  # as the planner does with what it recomputes
        before.append(graph)
        after.append(graph)
        if budget.chosen is None:  # a rank that keeps less than its update needs
            continue
        assert budget.chosen.plan.peak < plan.peak
        again = [n for n in budget.chosen.graph if n.meta.get("again")]
        assert again and not any(n.op_type in STARTS for n in again)
        assert exchanges(budget.chosen.graph) == exchanges(graph)
        assert not list(broken_halves(budget.chosen.graph))
        after[-1] = budget.chosen.graph
    assert any(mine is not others for mine, others in zip(before, after, strict=True))
    whole = meshed.whole_step(model, "AdamW", False)
    of, data = steps.parameter_of(whole), steps.batch("gpt2", 96, 4)
    full = pipes.split(model, steps.feeds(whole, model, data), 4, 2)
    given = [meshed.parts_of(model, m, g, of, full) for m, g in zip(meshes, before, strict=True)]
    for mine, others in zip(
        lockstep(meshes, before, given), lockstep(meshes, after, given), strict=True
    ):
        for output, y in mine.items():
            np.testing.assert_array_equal(others[output], y, err_msg=output)
