"""From gradients to a whole step: a list of passes over the gradients, each line with its reason.

A pass is `f(gradients, recipe)`: it adds nodes after the gradients and replaces the gradients, or
records a factor for them. A new pass needs a file and a line here; a new optimizer needs a record
in `graph/ops/optimizers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from onward.differentiate.loss_sum import obstacle
from onward.differentiate.mixed_samples import mixed_samples
from onward.differentiate.update.accumulate import accumulate, accumulators_as_gradients
from onward.differentiate.update.apply import apply
from onward.differentiate.update.average_labels import average_labels
from onward.differentiate.update.clip import clip, clip_value
from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.leave import leave
from onward.differentiate.update.local_sums import (
    local_gradients,
    local_gradients_of_each_batch,
    local_loss,
    local_sum,
)
from onward.differentiate.update.loss_scale import move_loss_scale, scale_loss
from onward.differentiate.update.recipe import Recipe, UpdateGroup
from onward.differentiate.update.skip_nonfinite import skip_nonfinite
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role
from onward.graph.types import DType, Type

log = logging.getLogger("onward")

UPDATE: tuple[Callable[[Gradients, Recipe], None], ...] = (
    local_gradients_of_each_batch,  # before accumulate, which then adds up parts of ranks' sums
    accumulate,  # later passes see the gradient of the whole window
    local_gradients,  # after accumulate, which adds up one rank's; later passes read all ranks'
    scale_loss,  # before clip, which needs the norm of unscaled gradients
    # before clip too; after scale_loss, which multiplies whatever reads a cotangent
    average_labels,
    clip,  # clips the gradient of the whole window
    skip_nonfinite,  # after clip: a finite norm shows that all gradients are finite
    clip_value,  # after skip_nonfinite, since it makes infinite gradients finite
    move_loss_scale,  # needs to know whether gradients are finite
    leave,  # reads the factor that the passes before have computed
    apply,  # reads what all others have left
    local_loss,  # last: nothing else may read the loss before its gradient is computed
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


def update_alone(parameters: Mapping[str, Type], recipe: Recipe) -> Graph:
    """Builds the update of a window that ends without another micro-batch: a graph whose gradients
    are the accumulators times `Signature.window_scale`. parameters: those of the recipe, as graph
    inputs."""
    graph = Graph("update")
    for name, kind in parameters.items():
        graph.input(name, kind, Role.PARAM)
    gradients = Gradients(graph, Builder(graph, module="optimizer", backward=True), {})
    accumulators_as_gradients(gradients, recipe)
    scale = graph.input("window_scale", Type(DType.DOUBLE, ()), Role.HYPER)
    graph.signature = graph.signature.but(window_scale=scale.name)
    if recipe.by_replica:  # the factor differs from replica to replica
        local_sum(gradients, gradients.builder, "scale", scale)
    else:
        gradients.scale_update(scale)
    for item in UPDATE:
        if item not in (average_labels, accumulate, local_gradients_of_each_batch):
            item(gradients, recipe)
    return graph


def settled(recipe: Recipe, forward: Graph, splits_samples: bool = False) -> Recipe:
    """Returns the recipe for this forward with its `average` decided, on "labels" only where the
    loss is a mean over labels. splits_samples: whether the graph of a rank has some of a batch's
    samples. Raises OnwardError where the loss must be such a mean and is not, or looks across
    samples that are apart."""
    if recipe.average == "micro_batches" or not (recipe.accumulate or recipe.joint):
        return replace(recipe, average="micro_batches")
    reason = obstacle(forward)
    if reason is None and splits_samples and (mixing := mixed_samples(forward)):
        raise OnwardError(
            f"ranks that share a batch would compute another loss than one process: {mixing}, and "
            "a rank has only those of its share; fix: a loss and norms that treat samples "
            "independently, or the mean of the losses of all ranks, each over its own samples as "
            'in DDP, by gradient_accumulation_average="micro_batches"'
        )
    if reason is None:
        return replace(recipe, average="labels")
    if recipe.joint:
        raise OnwardError(
            f"ranks that share a batch need a loss that is a mean over its labels: {reason}; fix: "
            "write it as (losses * mask).sum() / mask.sum(), or take the mean of the losses of "
            'all ranks by gradient_accumulation_average="micro_batches"'
        )
    if recipe.average == "labels":
        raise OnwardError(
            f'gradient_accumulation_average="labels" needs a loss that is a mean: {reason}; fix: '
            'write it as (losses * mask).sum() / mask.sum(), or choose "micro_batches"'
        )
    log.warning(
        "gradient accumulation takes the mean of the micro-batches' losses, not over all labels of "
        'the window (gradient_accumulation_average="auto"): %s', reason,
    )  # fmt: skip
    return replace(recipe, average="micro_batches")


__all__ = ["UPDATE", "Gradients", "Recipe", "UpdateGroup", "add_updates", "settled", "update_alone"]
