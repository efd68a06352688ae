"""The memory estimate against the plan that is made in the end, to the byte."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny
import tiny_families as families
from test_replay import Random

import onward
import onward.compile
from onward.graph.graph import Graph
from onward.plan import Plan, Search, make_plan
from onward.plan.estimate import MemoryEstimate
from onward.plan.order import order, sort
from onward.plan.select import select
from onward.rewrite import recompute, specialize


def lowered(graph: Graph) -> tuple[Graph, MemoryEstimate]:
    """The graph as the search for recomputation sees it, and its estimate."""
    graph = graph.clone()
    kernels = select(graph)
    sort(graph)
    return graph, MemoryEstimate(graph, kernels)


def again(graph: Graph, memory: MemoryEstimate, chosen: set[int]) -> tuple[Plan, bool]:
    """The plan with these launches recomputed, and whether it keeps the supposed order."""
    repeated = graph.clone()
    recompute(repeated, memory.values(chosen))
    supposed = [f"{node.name}{'.again' * late}" for node, late in memory.sequence(chosen)]
    names = set(supposed)
    actual = [node.name for node in order(repeated) if node.name in names]
    return make_plan(repeated, {}), actual == supposed


def written_back(plan: Plan) -> bool:
    return any(launch.text.startswith("write back") for launch in plan.launches)


def test_random_graphs_are_estimated_to_the_byte() -> None:
    """Estimates are exact as the graphs are, and with any of their forward half recomputed.

    Where the plan keeps the order supposed, the bytes are equal. It need not: a launch that runs
    early because it frees a value frees it no longer once the backward half reads a twin. The bytes
    then differ by what is alive between the two places; in these graphs of some twenty values of
    one size that is at most six of them.
    """
    tried = alike = 0
    for seed in range(80):
        bound = specialize(Random(seed).draw(24), {})
        graph, memory = lowered(bound)
        plan = make_plan(bound, {})
        assert memory.estimate(()).nbytes == plan.lower_bound, seed
        rng = random.Random(seed)
        repeatable = [i for i, able in enumerate(memory.repeatable) if able]
        for _ in range(2 if repeatable else 0):
            chosen = set(rng.sample(repeatable, rng.randint(1, len(repeatable))))
            found, kept_order = again(graph, memory, chosen)
            if written_back(found) and not written_back(plan):
                continue  # what is done again reads a parameter late: its update writes elsewhere
            tried += 1
            alike += kept_order
            allowed = 0 if kept_order else 6 * 128
            assert abs(memory.estimate(chosen).nbytes - found.lower_bound) <= allowed, seed
    assert tried > 100
    assert alike > 0.8 * tried


MODELS: dict[str, Any] = {
    "gpt2": lambda: (tiny.gpt2(layers=3, width=16), tiny.batch(4, 24, "right")),
    "bert": lambda: (tiny.bert(layers=3, width=16), tiny.batch(4, 24, "right")),
    "llama": lambda: (families.of("Llama", "CausalLM")(), families.padded()),
    "t5": lambda: (families.of("T5", "ConditionalGeneration")(), families.summaries()),
    "towers": lambda: (families.Towers(), families.pairs(1)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", MODELS)
def test_models_are_estimated_to_the_byte(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates hold for every plan of a step within a budget, and for the proposals of the search.

    The order of a model's launches hardly changes when some are done again: 1 % is allowed there.
    """
    plain, judge = onward.compile.make_plan, Search.judge
    plans: list[Plan] = []
    judged: list[tuple[int, int]] = []

    def compared(graph: Graph, dims: dict[str, int], **more: Any) -> Plan:
        plan = plain(graph, dims, **more)
        _, memory = lowered(graph)
        assert memory.estimate(()).nbytes == plan.lower_bound
        plans.append(plan)
        return plan

    def judging(self: Search, plan: Plan) -> None:
        judged.append((self._now.nbytes, plan.lower_bound))
        judge(self, plan)

    monkeypatch.setattr(onward.compile, "make_plan", compared)
    monkeypatch.setattr(Search, "judge", judging)
    model, data = MODELS[kind]()
    options = onward.TrainerOptions(memory_budget=0.5, max_grad_norm=1.0)
    trainer = onward.Trainer(model, onward.optim.AdamW(), options=options)
    trainer.train_step(data)
    trainer.eval_step(data)
    assert len(plans) > 3
    assert judged
    for estimated, bound in judged:
        assert abs(estimated - bound) <= 0.01 * bound
