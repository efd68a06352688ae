"""`g <- accumulator + g`: several micro-batches make one update.

Sums are computed in the gradients' own type. Between micro-batches they may be stored in fewer
bits; the last sum, which the update reads, is not rounded.
"""

from __future__ import annotations

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.recipe import Recipe
from onward.graph.graph import Role, Value, type_of
from onward.graph.types import DType


def accumulate(gradients: Gradients, recipe: Recipe) -> None:
    """Adds accumulators. New inputs: one accumulator per parameter; new outputs: their next values.
    A run that asks for these alone is a micro-step without an update."""
    if not recipe.accumulate:
        return
    graph, b = gradients.graph, gradients.builder
    sources: dict[str, str] = {}
    totals: dict[str, str] = {}
    for name, g in gradients.of.items():
        own = type_of(g)
        low = recipe.accumulator if own.dtype == DType.FLOAT else None
        kind = own if low is None else own.with_dtype(low)
        held: Value = graph.input(f"accumulator.{name}", kind, Role.STATE)
        before = held if low is None else b.Cast(held, to=own.dtype)
        total = gradients.of[name] = b.Add(before, g)
        after = total if low is None else b.Cast(total, to=low)
        sources[name] = held.name or ""
        totals[name] = graph.output(f"accumulated.{name}", after, held)
    graph.signature = graph.signature.but(accumulators=sources, accumulated=totals)
