"""Keras 3 models whose training step runs in Onward, on the TensorFlow, JAX and torch backends.

    from onward.integrations.keras import accelerate

    model.compile("adamw", loss="mse")
    accelerate(model)
    model.fit(x, y)

Everything around the step is Keras's own code: data, callbacks, metrics, evaluation, prediction,
saving. A step's forward, loss and backward are one graph of `onward.Trainer`; the model's optimizer
then updates Keras's own variables, so that what a callback or a file reads is never old. What has
no such graph is refused in one line that names the layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from onward.errors import OnwardError
from onward.integrations.keras_package import keras
from onward.integrations.keras_refusals import refuse_model, refuse_options
from onward.integrations.keras_steps import KerasSteps
from onward.options import TrainerOptions
from onward.train import Trainer
from onward.train.arguments import checked_options

_STEPS: weakref.WeakKeyDictionary[Any, KerasSteps] = weakref.WeakKeyDictionary()


def accelerate(model: Any, options: TrainerOptions | Mapping[str, Any] | None = None) -> Any:
    """Has a compiled Keras model train in Onward: `fit` and `train_on_batch` from now on.

    options: those of `onward.Trainer` (`mixed_precision`, `memory_budget`, ...), but for what the
    Keras optimizer decides. Returns the model itself. Raises OnwardError for a model that is not
    compiled, and for what is known beforehand to have no graph; other refusals come with the first
    batch, before anything is trained.
    """
    if not isinstance(model, keras.Model):
        raise OnwardError(f"model is a {type(model).__name__}; fix: pass a compiled keras.Model")
    found = checked_options(options)
    refuse_options(found)
    refuse_model(model)
    steps = _STEPS.get(model)
    if steps is None:
        steps = _STEPS[model] = steps_of(keras.backend.backend())(model)
    steps.options = found
    steps.programs.clear()
    steps.hook()
    return model


def steps_in(model: Any) -> KerasSteps | None:
    """The steps of an accelerated model; None for another."""
    return _STEPS.get(model)


def trainer_of(model: Any) -> Trainer:
    """The onward.Trainer of an accelerated model's last step, for `report()`, `plan`, `explain`.
    Raises OnwardError before the first step."""
    steps = steps_in(model)
    if steps is None or steps.last is None:
        raise OnwardError("no step has run in Onward; fix: accelerate(model), then fit")
    return steps.last


def steps_of(backend: str) -> Callable[[Any], KerasSteps]:
    """The class of steps of a backend. Raises OnwardError for a backend that does not train."""
    if backend == "tensorflow":
        from onward.integrations.keras_tensorflow import TensorFlowSteps

        return TensorFlowSteps
    if backend == "jax":
        from onward.integrations.keras_jax import JaxSteps

        return JaxSteps
    if backend == "torch":
        from onward.integrations.keras_torch import TorchSteps

        return TorchSteps
    raise OnwardError(
        f"Keras's {backend} backend does not train; fix: KERAS_BACKEND=tensorflow, jax or torch"
    )


__all__ = ["accelerate", "steps_in", "trainer_of"]
