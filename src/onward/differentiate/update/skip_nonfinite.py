"""Skips the update of a step with an infinite or NaN gradient: nothing that outlives the step is
written."""

from __future__ import annotations

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.local_sums import local_sum
from onward.differentiate.update.recipe import Recipe


def skip_nonfinite(gradients: Gradients, recipe: Recipe) -> None:
    """Tests whether all gradients are finite. New output: `finite`, b[]. If clipping has computed
    their norm, the norm is tested instead.

    Under loss scaling a norm that overflows counts as well: clipping by it would leave only zeros,
    and a smaller scale helps.
    """
    if not recipe.skip_nonfinite or not gradients.of:
        return
    graph, norm = gradients.graph, gradients.norm
    if recipe.loss_scale is not None and norm is not None:
        finite = gradients.builder.AllFinite(None, norm)
    else:
        finite = gradients.builder.AllFinite(norm, *gradients.of.values())
    if recipe.joint:
        finite = local_sum(gradients, gradients.builder, "finite", finite)
    gradients.finite = finite
    graph.signature = graph.signature.but(finite=graph.output("finite", finite))
