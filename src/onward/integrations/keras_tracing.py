"""A Keras model's training forward and loss as one function of arrays, for a backend's exporter.

Weights are arguments, so that no exporter folds, renames or turns them. Each dropout multiplies its
input by a number of its own, which is an argument as well: no exporter folds that either, and
`keras_onnx.py` puts ONNX's Dropout in the place of each product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from typing import Any

from onward.errors import OnwardError
from onward.integrations.keras_package import keras, tree
from onward.integrations.keras_refusals import layer_here


@dataclass
class KerasForward:
    """The training forward of a model with its loss.

    structure: `(x, y, sample_weight)` with a number in place of each array: its place among the
    leaves. predictions: the structure of the outputs, likewise, once it has been called. masked:
    which outputs have a mask. updated: the places, among the model's non-trainable variables, of
    those that the forward changes. rates: of the dropouts, in their order. is_open: whether one
    graph serves batches of all sizes.
    """

    model: Any
    structure: Any
    rates: list[float] = field(default_factory=list)
    predictions: Any = None
    masked: list[int] = field(default_factory=list)
    updated: list[int] = field(default_factory=list)
    is_open: bool = True

    def __call__(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        metrics: Sequence[Any],
        leaves: Sequence[Any],
        factors: Sequence[Any] | None,
    ) -> list[Any]:
        """Returns the loss, the outputs, the masks of those that have one, and the new values of
        the variables that change. factors: one for each dropout; None: they are counted."""
        x, y, weight = packed(self.structure, leaves)
        with dropout_as_factors(self.rates, factors):
            loss, outputs, others_after, metrics_after = self._forward(
                trainable, others, metrics, x, y, weight
            )
        self._refuse_metrics(metrics, metrics_after)
        flat = tree.flatten(outputs)
        self.predictions = numbered(outputs)
        masks = [getattr(output, "_keras_mask", None) for output in flat]
        self.masked = [i for i, mask in enumerate(masks) if mask is not None]
        pairs = enumerate(zip(others, others_after, strict=True))
        self.updated = [i for i, (before, after) in pairs if after is not before]
        return [
            loss,
            *flat,
            *(mask for mask in masks if mask is not None),
            *(others_after[i] for i in self.updated),
        ]

    def names(self) -> list[str]:
        """The names of what a call returns."""
        outputs = len(tree.flatten(self.predictions))
        return [
            "loss",
            *(f"output_{i}" for i in range(outputs)),
            *(f"mask_{i}" for i in self.masked),
            *(f"state_{i}" for i in self.updated),
        ]

    def _forward(
        self,
        trainable: Sequence[Any],
        others: Sequence[Any],
        metrics: Sequence[Any],
        x: Any,
        y: Any,
        weight: Any,
    ) -> tuple[Any, Any, list[Any], list[Any]]:
        """Calls the model and its loss as the `train_step` of the backend's own trainer does."""
        model = self.model
        if keras.backend.backend() == "jax":
            _, (loss, outputs, others_after, metrics_after) = model.compute_loss_and_updates(
                trainable, others, metrics, x, y, weight, training=True,
                optimizer_variables=[],
            )  # fmt: skip
            return loss, outputs, others_after, metrics_after
        pairs = zip(
            [*model.trainable_variables, *model.non_trainable_variables, *model.metrics_variables],
            [*trainable, *others, *metrics],
            strict=True,
        )
        with keras.StatelessScope(state_mapping=list(pairs), collect_losses=True) as scope:
            mode = {"training": True} if model._call_has_training_arg else {}
            outputs = model(x, **mode)
            loss = model._compute_loss(
                x=x, y=y, y_pred=outputs, sample_weight=weight, training=True
            )
        after = [
            [scope.get_current_value(v) for v in variables]
            for variables in (model.non_trainable_variables, model.metrics_variables)
        ]
        return loss, outputs, after[0], after[1]

    def _refuse_metrics(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Raises OnwardError where the loss updates a metric of the model's own."""
        model = self.model
        compiled = [] if model._compile_loss is None else model._compile_loss.metrics
        known = {id(v) for metric in compiled for v in metric.variables}
        for variable, old, new in zip(model.metrics_variables, before, after, strict=True):
            if new is not old and id(variable) not in known:
                raise OnwardError(
                    f"the loss updates the metric variable '{variable.path}', which a graph cannot "
                    "write; fix: update metrics in compute_metrics"
                )


def numbered(structure: Any) -> Any:
    """The structure with the place of each leaf in place of the leaf; None stays."""
    places = count()
    flat = [None if leaf is None else next(places) for leaf in tree.flatten(structure)]
    return tree.pack_sequence_as(structure, flat)


def packed(structure: Any, leaves: Sequence[Any]) -> Any:
    """Leaves in a structure that `numbered` has made."""
    flat = [None if place is None else leaves[place] for place in tree.flatten(structure)]
    return tree.pack_sequence_as(structure, flat)


@contextmanager
def dropout_as_factors(rates: list[float], factors: Sequence[Any] | None) -> Iterator[None]:
    """A context in which `keras.layers.Dropout` multiplies its input by the next factor, and in
    which nothing else may draw. rates: is filled with the rates, in the order of the calls."""
    rates.clear()

    def call(layer: Any, inputs: Any, training: bool = False) -> Any:
        if not training or not layer.rate:
            return inputs
        place = len(rates)
        rates.append(float(layer.rate))
        return inputs if factors is None else inputs * factors[place]

    with _replaced(keras.layers.Dropout, "call", call), nothing_drawn():
        yield


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """A context in which Keras's random functions raise OnwardError, naming the layer."""
    random = import_module(f"keras.src.backend.{keras.backend.backend()}.random")

    def draw(*_: Any, **__: Any) -> Any:
        raise OnwardError(
            f"layer '{layer_here()}' draws random numbers, of which Onward's graphs have dropout "
            "alone; fix: keras.layers.Dropout, or draw in the data pipeline"
        )

    with _replaced(random, "draw_seed", draw):
        yield


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


__all__ = ["KerasForward", "dropout_as_factors", "nothing_drawn", "numbered", "packed"]
