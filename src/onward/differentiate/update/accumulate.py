"""`g <- accumulator + g`: several micro-batches make one update."""

from __future__ import annotations

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.recipe import Recipe
from onward.graph.graph import Role, type_of


def accumulate(gradients: Gradients, recipe: Recipe) -> None:
    """New inputs: one accumulator per parameter; new outputs: their next values. A run that asks
    for these alone is a micro-step without an update."""
    if not recipe.accumulate:
        return
    graph = gradients.graph
    sources: dict[str, str] = {}
    totals: dict[str, str] = {}
    for name, g in gradients.of.items():
        held = graph.input(f"accumulator.{name}", type_of(g), Role.STATE)
        total = gradients.of[name] = gradients.builder.Add(held, g)
        sources[name] = held.name or ""
        totals[name] = graph.output(f"accumulated.{name}", total, held)
    graph.signature = graph.signature.but(accumulators=sources, accumulated=totals)
