"""Records what is summed over the samples of one rank, where several ranks share each batch.

Each such value passes through an Identity that the signature names. What reads it is to get the sum
over all ranks; `distribute/data_parallel.py` writes the exchange in the Identity's place.
"""

from __future__ import annotations

from collections.abc import Sequence

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.recipe import Recipe
from onward.graph.build import Builder
from onward.graph.graph import Value


def local_sum(gradients: Gradients, b: Builder, name: str, value: Value) -> Value:
    """Writes the Identity of a value of one rank, records it in `Signature.local_sums`, and returns
    it."""
    graph, made = gradients.graph, b.Identity(value)
    output = graph.output(f"local.{name}", made)
    graph.signature = graph.signature.but(local_sums={name: output})
    return made


def local_gradients(gradients: Gradients, recipe: Recipe) -> None:
    """Records the gradients, which are sums over the window of one rank until then."""
    if recipe.joint:
        _record(gradients, [name for name in gradients.of if name not in recipe.summed_parts])


def local_gradients_of_each_batch(gradients: Gradients, recipe: Recipe) -> None:
    """Records the gradients of a micro-batch that are summed over the ranks first, and then, a
    part on each rank, over the window (ZeRO stage 2)."""
    if recipe.joint:
        _record(gradients, [name for name in gradients.of if name in recipe.summed_parts])


def _record(gradients: Gradients, names: Sequence[str]) -> None:
    graph, b = gradients.graph, gradients.builder
    made = {name: b.Identity(gradients.of[name]) for name in names}
    gradients.of.update(made)
    graph.signature = graph.signature.but(
        local_gradients={n: graph.output(f"local.gradient.{n}", v) for n, v in made.items()}
    )


def local_loss(gradients: Gradients, recipe: Recipe) -> None:
    """Records the loss where it is a mean over one rank's samples, rather than a sum and a count
    (`average_labels`)."""
    graph = gradients.graph
    if not recipe.joint or graph.signature.loss is None or graph.signature.windowed:
        return
    loss = graph.outputs[graph.signature.loss]
    made = local_sum(gradients, gradients.builder, "loss", loss)
    graph.outputs.update({name: made for name, value in graph.outputs.items() if value is loss})


__all__ = ["local_gradients", "local_gradients_of_each_batch", "local_loss", "local_sum"]
