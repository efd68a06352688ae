"""Leaves gradients among the outputs, for an optimizer that makes its update outside of a graph."""

from __future__ import annotations

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.recipe import Recipe
from onward.graph.ops.optimizers.arithmetic import scaled


def leave(gradients: Gradients, recipe: Recipe) -> None:
    """Adds an output for each of `recipe.left_gradients`: the gradient of the whole window, divided
    by the loss scale and clipped, of its parameter's type."""
    graph, b = gradients.graph, gradients.builder
    graph.signature = graph.signature.but(
        left_gradients={
            name: graph.output(f"gradient.{name}", scaled(b, gradients.of[name], gradients.scale))
            for name in recipe.left_gradients
        }
    )
