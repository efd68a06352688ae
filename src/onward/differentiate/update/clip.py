"""Clipping as torch does it: all gradients by the norm of them as one vector, or each element.

clip_grad_norm_     g <- g min(1, max / norm)
clip_grad_value_    g <- min(max(g, -most), most)
"""

from __future__ import annotations

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.local_sums import local_sum
from onward.differentiate.update.recipe import Recipe
from onward.graph.graph import type_of

EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm before dividing


def clip(gradients: Gradients, recipe: Recipe) -> None:
    """Computes the clipping factor and leaves it to the update as `scale`. New output: the norm of
    all gradients before clipping, after any factor that they already have."""
    if recipe.max_grad_norm is None or not gradients.of:
        return
    b, graph = gradients.builder, gradients.graph
    # the norm of the norms, as in torch
    each = [b.reshape(b.ReduceL2(g, keepdims=0), (1,)) for g in gradients.of.values()]
    norms = b.Concat(*each, axis=0) if len(each) > 1 else each[0]
    if recipe.joint:
        norms = local_sum(gradients, b, "norms", norms)
    norm = b.ReduceL2(norms, keepdims=0)
    before = gradients.scale
    if before is not None:
        norm = b.Mul(norm, before)
    graph.signature = graph.signature.but(grad_norm=graph.output("grad_norm", norm))
    gradients.norm = norm
    factor = b.Min(b.Div(recipe.max_grad_norm, b.Add(norm, EPSILON)), 1.0)
    gradients.scale = factor if before is None else b.Mul(factor, before)


def clip_value(gradients: Gradients, recipe: Recipe) -> None:
    """Limits every element of the gradients, as they are after any factor that the update still has
    to multiply them by."""
    if recipe.max_grad_value is None:
        return
    b = gradients.builder
    for name, g in gradients.of.items():
        most = b.scalar(recipe.max_grad_value, type_of(g).dtype)
        if gradients.scale is not None:  # which is positive
            most = b.Div(most, gradients.scale)
        gradients.of[name] = b.Min(b.Max(g, b.Neg(most)), most)


__all__ = ["clip", "clip_value"]
