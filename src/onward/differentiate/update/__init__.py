"""From gradients to a whole step: a list of passes over the gradients, each line with its reason.

A pass is `f(gradients, recipe)`: it writes nodes behind the gradients and says what becomes of
them. Adding one takes its file and its line; an optimizer is a record in `graph/ops/optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable

from onward.differentiate.update.accumulate import accumulate
from onward.differentiate.update.apply import apply
from onward.differentiate.update.clip import clip
from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.loss_scale import move_loss_scale, scale_loss
from onward.differentiate.update.recipe import Recipe, UpdateGroup
from onward.differentiate.update.skip_nonfinite import skip_nonfinite
from onward.graph.graph import Graph

UPDATE: tuple[Callable[[Gradients, Recipe], None], ...] = (
    accumulate,  # first: a window's gradient is that of all its micro-batches
    scale_loss,  # before clip: the norm is that of gradients without the scale
    clip,  # what is clipped is the gradient of the whole window
    skip_nonfinite,  # after clip: a norm that is finite says it of every gradient
    move_loss_scale,  # goes by whether gradients are finite
    apply,  # last: it reads what all the others have left
)


def add_updates(graph: Graph, recipe: Recipe) -> Graph:
    """A copy of a differentiated graph with the next parameters and state among its outputs; its
    signature says which (`graph/signature.py`).

    Raises KeyError where the graph has no gradient of a parameter that the recipe names.
    """
    graph = graph.clone()
    gradients = Gradients.taken_from(graph)
    for item in UPDATE:
        item(gradients, recipe)
    return graph


__all__ = ["UPDATE", "Gradients", "Recipe", "UpdateGroup", "add_updates"]
