"""From gradients to a whole step: a list of passes over the gradients, each line with its reason.

A pass is `f(gradients, recipe)`: it adds nodes after the gradients and replaces the gradients, or
records a factor for them. A new pass needs a file and a line here; a new optimizer needs a record
in `graph/ops/optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable

from onward.differentiate.update.accumulate import accumulate
from onward.differentiate.update.apply import apply
from onward.differentiate.update.clip import clip
from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.leave import leave
from onward.differentiate.update.loss_scale import move_loss_scale, scale_loss
from onward.differentiate.update.recipe import Recipe, UpdateGroup
from onward.differentiate.update.skip_nonfinite import skip_nonfinite
from onward.graph.graph import Graph

UPDATE: tuple[Callable[[Gradients, Recipe], None], ...] = (
    accumulate,  # first: later passes see the gradient of the whole window
    scale_loss,  # before clip, which needs the norm of unscaled gradients
    clip,  # clips the gradient of the whole window
    skip_nonfinite,  # after clip: a finite norm shows that all gradients are finite
    move_loss_scale,  # needs to know whether gradients are finite
    leave,  # reads the factor that the passes before have computed
    apply,  # last: reads what all others have left
)


def add_updates(graph: Graph, recipe: Recipe) -> Graph:
    """Returns a copy of a differentiated graph with the next parameters and state among its
    outputs, as its signature records (`graph/signature.py`).

    Raises KeyError where the recipe names a parameter that has no gradient in the graph.
    """
    graph = graph.clone()
    gradients = Gradients.taken_from(graph)
    for item in UPDATE:
        item(gradients, recipe)
    return graph


__all__ = ["UPDATE", "Gradients", "Recipe", "UpdateGroup", "add_updates"]
