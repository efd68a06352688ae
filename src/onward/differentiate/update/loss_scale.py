"""The loss scale: backward starts from `scale` instead of 1, and the update divides by it.

This keeps gradients that are too small for fp16. An infinite or NaN gradient means that the scale
was too large. The rule is that of `torch.amp.GradScaler`:

    finite:  after `growth_interval` updates in a row  scale <- scale growth_factor
    else:    the update is skipped                     scale <- scale backoff_factor
"""

from __future__ import annotations

import numpy as np

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.recipe import Recipe
from onward.graph.graph import Role
from onward.graph.types import DType, Type
from onward.options import LEAST_SCALE, LossScale


def scale_loss(gradients: Gradients, recipe: Recipe) -> None:
    """Scales the loss for backward, and leaves the division to the update. New input, if a rule
    moves the scale: `loss_scale`, f32[]."""
    if recipe.loss_scale is None or not gradients.of:
        return
    graph, b = gradients.graph, gradients.builder
    if isinstance(recipe.loss_scale, LossScale):
        scale = graph.input("loss_scale", Type(DType.FLOAT, ()), Role.HYPER)
        graph.signature = graph.signature.but(loss_scale=scale.name)
        divided = b.Reciprocal(scale)
    else:
        scale = b.scalar(recipe.loss_scale, DType.FLOAT)
        divided = b.scalar(1.0 / recipe.loss_scale, DType.FLOAT)
    gradients.scale_cotangents(scale)
    gradients.scale_update(divided)


def move_loss_scale(gradients: Gradients, recipe: Recipe) -> None:
    """Computes the next loss scale. New input: `growth_tracker`, i64[]. New outputs: the next scale
    and tracker. They are no state of the graph, since they change even in a step that writes
    nothing."""
    rule, graph, b = recipe.loss_scale, gradients.graph, gradients.builder
    named, finite = graph.signature.loss_scale, gradients.finite
    if not isinstance(rule, LossScale) or named is None:
        return
    assert finite is not None, "a scale that moves needs to know whether gradients are finite"
    scale = graph.find_input(named)
    tracker = graph.input("growth_tracker", Type(DType.INT64, ()), Role.HYPER)
    count = b.Add(tracker, _whole(1))
    stays = b.Less(count, _whole(rule.growth_interval))
    factor = b.Where(
        finite, b.Where(stays, _double(1.0), _double(rule.growth_factor)),
        _double(rule.backoff_factor),
    )  # fmt: skip
    # torch multiplies in double, and keeps a scale that would become infinite
    moved = b.cast(b.Mul(b.cast(scale, DType.DOUBLE), factor), DType.FLOAT)
    moved = b.Where(b.IsInf(moved), scale, moved)
    # unlike torch's, it never becomes 0, by which gradients cannot be divided
    moved = b.Max(moved, LEAST_SCALE)
    counted = b.Where(b.And(finite, stays), count, _whole(0))
    made = {named: moved, tracker.name or "": counted}
    graph.signature = graph.signature.but(
        growth_tracker=tracker.name,
        rescaled={name: graph.output(f"next.{name}", value) for name, value in made.items()},
    )


def _whole(number: int) -> np.ndarray:
    return np.array(number, dtype=np.int64)


def _double(number: float) -> np.ndarray:
    return np.array(number, dtype=np.float64)


__all__ = ["move_loss_scale", "scale_loss"]
