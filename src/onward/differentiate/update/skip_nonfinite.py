"""Where a gradient is infinite or NaN, nothing that outlives the step is written."""

from __future__ import annotations

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.recipe import Recipe


def skip_nonfinite(gradients: Gradients, recipe: Recipe) -> None:
    """New output `finite`, b[]. A norm says it of all gradients that it was made of."""
    if not recipe.skip_nonfinite or not gradients.of:
        return
    graph = gradients.graph
    finite = gradients.builder.AllFinite(gradients.norm, *gradients.of.values())
    graph.signature = graph.signature.but(finite=graph.output("finite", finite))
