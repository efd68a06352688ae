"""`g <- accumulator + g`: several micro-batches make one update.

Sums are computed in the gradients' own type. Between micro-batches they may be stored in fewer
bits; the last sum, which the update reads, is not rounded.
"""

from __future__ import annotations

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.recipe import Recipe
from onward.graph.graph import Role, Value, type_of
from onward.graph.types import DType, Type


def accumulate(gradients: Gradients, recipe: Recipe) -> None:
    """Adds accumulators. New inputs: one accumulator per parameter; new outputs: their next values.
    A run that asks for these alone is a micro-step without an update."""
    if not recipe.accumulate:
        return
    graph, b = gradients.graph, gradients.builder
    sources: dict[str, str] = {}
    totals: dict[str, str] = {}
    for name, g in gradients.of.items():
        held, before = _accumulator(gradients, recipe, name, type_of(g))
        total = gradients.of[name] = b.Add(before, g)
        after = b.cast(total, type_of(held).dtype)
        sources[name] = held.name or ""
        totals[name] = graph.output(f"accumulated.{name}", after, held)
    graph.signature = graph.signature.but(accumulators=sources, accumulated=totals)


def accumulators_as_gradients(gradients: Gradients, recipe: Recipe) -> None:
    """Takes the accumulators of the recipe's parameters as the gradients, where no micro-batch
    comes before the update."""
    graph, sources = gradients.graph, dict[str, str]()
    for name in recipe.parameters:
        kind = type_of(graph.find_input(name))
        held, gradients.of[name] = _accumulator(gradients, recipe, name, kind)
        sources[name] = held.name or ""
    graph.signature = graph.signature.but(accumulators=sources)


def _accumulator(gradients: Gradients, recipe: Recipe, name: str, own: Type) -> tuple[Value, Value]:
    """A new input, the accumulator of a parameter whose gradient is of type `own`, and its value in
    that type."""
    low = recipe.accumulator if own.dtype == DType.FLOAT else None
    kind = own if low is None else own.with_dtype(low)
    held = gradients.graph.input(f"accumulator.{name}", kind, Role.STATE)
    return held, gradients.builder.cast(held, own.dtype)


__all__ = ["accumulate", "accumulators_as_gradients"]
