"""The loss of a window as the mean over its labels, however many each micro-batch holds.

    s, n = sum and divisor of the micro-batch       g = ds / dparameters
    sums of a window:  sum of g / unit,  labels = sum of n,  loss = sum of s
    update:            gradient = (sum of g / unit) unit / labels

That is the gradient of one batch of all samples. unit is the first n above 0, so that backward
works on numbers of the size of a mean's, which matters in fp16.

Where replicas of the data are combined adaptively (`Recipe.adasum`), the gradient of each has to be
that of its own mean: `unit / labels of the replica` is recorded as the sum "scale" for
`distribute/adasum.py`, instead of being left to the update. The loss stays that of all ranks.
"""

from __future__ import annotations

from onward.differentiate.loss_sum import bounded, unbounded
from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.local_sums import local_sum
from onward.differentiate.update.recipe import Recipe
from onward.graph.build import Builder
from onward.graph.graph import Role, Value, type_of
from onward.graph.types import DType, Type


def average_labels(gradients: Gradients, recipe: Recipe) -> None:
    """Weighs a micro-batch's gradients by its labels, and leaves the division by the window's to
    the update. New inputs: what the window has added up, f64[]; new outputs: the same after this
    micro-batch. The loss, a sum so far, becomes the mean."""
    graph, b = gradients.graph, gradients.builder
    name, loss = graph.signature.divisor, graph.signature.loss
    if name is None or loss is None:
        return
    divisor, total = graph.outputs.pop(name), graph.outputs[loss]
    early = gradients.before_backward()
    keys = ["unit", "labels", "loss", *(["replica_labels"] if recipe.by_replica else [])]
    held = {key: graph.input(f"window.{key}", Type(DType.DOUBLE, ()), Role.HYPER) for key in keys}
    counted = own = early.cast(early.reshape(unbounded(divisor), ()), DType.DOUBLE)
    if recipe.joint:
        counted = local_sum(gradients, early, "labels", counted)
    if recipe.by_replica:
        own = early.Add(held["replica_labels"], local_sum(gradients, early, "replica_labels", own))
    unit = early.Where(early.Greater(held["unit"], 0.0), held["unit"], counted)
    labels = early.Add(held["labels"], counted)
    whole = bounded(early, divisor, labels)
    safe = _or_one(early, unit)
    gradients.scale_cotangents(early.Reciprocal(safe))
    [given] = graph.signature.cotangents.values()
    made: dict[str, Value] = {}
    if recipe.by_replica:
        made = {"replica_labels": own, "replica_divisor": bounded(early, divisor, own)}
        weight = early.cast(graph.find_input(given), DType.DOUBLE)
        mean = early.Mul(weight, _or_one(early, made["replica_divisor"]))
        local_sum(gradients, early, "scale", early.Div(safe, mean))
    else:
        weight = b.cast(graph.find_input(given), DType.DOUBLE)
        gradients.scale_update(b.Div(safe, b.Mul(weight, _or_one(b, whole))))
    # written last: the loss and its gradient are one op, which nothing may read before
    wide = b.cast(total, DType.DOUBLE)
    if recipe.joint:
        wide = local_sum(gradients, b, "loss", wide)
        divisor = bounded(early, divisor, counted)
    mean = b.cast(b.Div(wide, divisor), type_of(total).dtype)
    graph.outputs.update({n: mean for n, value in graph.outputs.items() if value is total})
    made |= {
        "unit": unit, "labels": labels, "divisor": whole, "loss": b.Add(held["loss"], wide)
    }  # fmt: skip
    graph.signature = graph.signature.but(
        divisor=None,
        window={key: value.name or "" for key, value in held.items()},
        windowed={key: graph.output(f"next.window.{key}", made[key]) for key in made},
    )


def _or_one(b: Builder, count: Value) -> Value:
    """A count f64[], or 1 where it is 0, as it is where no micro-batch has had a label."""
    return b.Where(b.Greater(count, 0.0), count, b.scalar(1.0, DType.DOUBLE))
