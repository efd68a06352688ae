"""What of a Keras model has no training step in Onward, each refused in one line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from onward.errors import OnwardError, one_line
from onward.integrations.keras_package import keras
from onward.options import TrainerOptions

# options of onward.Trainer about what the Keras optimizer does
_DECIDED = {
    "gradient_accumulation_steps": "gradient_accumulation_steps= of the Keras optimizer",
    "max_grad_norm": "global_clipnorm= of the Keras optimizer",
    "max_grad_value": "clipvalue= of the Keras optimizer",
    "ema_decay": "use_ema= of the Keras optimizer",
    "mesh": "one process",
}


def refuse_options(options: TrainerOptions) -> None:
    """Raises OnwardError for an option that the Keras optimizer decides."""
    plain = TrainerOptions()
    for name, fix in _DECIDED.items():
        if getattr(options, name) != getattr(plain, name):
            raise OnwardError(f"{name} is not an option of a Keras model's step; fix: {fix}")
    if options.mixed_precision == "fp16":
        raise OnwardError(
            "mixed_precision='fp16' skips updates, which a Keras optimizer would count; fix: 'bf16'"
        )


def refuse_model(model: Any) -> None:
    """Raises OnwardError for a model without a training step in Onward, as far as its layers and
    what it was compiled with say."""
    if not model.compiled or model.optimizer is None:
        raise OnwardError("the model is not compiled; fix: model.compile(optimizer, loss) first")
    if model.run_eagerly:
        raise OnwardError("run_eagerly=True runs Python in each step; fix: compile without it")
    own = next((c for c in type(model).__mro__ if "train_step" in vars(c)), None)
    if own is not None and not own.__module__.startswith("keras.src.backend."):
        raise OnwardError(
            f"{own.__name__}.train_step is the model's own, which no graph replaces; fix: "
            "override call or compute_loss in its place"
        )
    if keras.distribution.distribution() is not None or _replicas(model) > 1:
        raise OnwardError("the model is distributed by Keras; fix: train in one process")
    if getattr(model.optimizer, "loss_scale_factor", None) is not None or hasattr(
        model.optimizer, "inner_optimizer"
    ):
        raise OnwardError(
            f"{type(model.optimizer).__name__} scales the loss; fix: an optimizer without a loss "
            "scale, and options={'mixed_precision': 'bf16'} for products in bfloat16"
        )
    for layer in model._flatten_layers():
        _refuse_layer(layer)


def _refuse_layer(layer: Any) -> None:
    policy = layer.dtype_policy
    if policy.compute_dtype not in ("float32", None) and layer.weights:
        raise OnwardError(
            f"layer '{layer.name}' computes in {policy.compute_dtype}; fix: the policy float32, "
            "and options={'mixed_precision': 'bf16'} for products in bfloat16"
        )
    if isinstance(layer, keras.layers.Dropout) and layer.rate and layer.noise_shape is not None:
        raise OnwardError(
            f"layer '{layer.name}' has a noise_shape, which drops whole slices; fix: Dropout "
            "without noise_shape"
        )


def _replicas(model: Any) -> int:
    strategy = getattr(model, "_distribute_strategy", None)
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)


def layer_in(trace: TracebackType | None) -> str:
    """The innermost layer whose code a traceback passed through, as ` (layer 'name')`; empty where
    there is none."""
    found = ""
    while trace is not None:
        own: Any = trace.tb_frame.f_locals.get("self")
        if isinstance(own, keras.layers.Layer) and not isinstance(own, keras.Model):
            found = f" (layer '{own.name}')"
        trace = trace.tb_next
    return found


def layer_here() -> str:
    """The name of the innermost layer whose code is running."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, keras.layers.Layer):
            return str(own.name)
        frame = frame.f_back
    return "?"


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """A context in which any exception becomes an OnwardError of one line that names the layer."""
    try:
        yield
    except OnwardError as error:
        said = _without_arguments(str(error))
        if said == str(error):
            raise
        raise OnwardError(said) from error
    except Exception as error:  # whatever Keras, the backend and the exporter raise
        where = layer_in(error.__traceback__)
        said = one_line(_without_arguments(str(error)) or type(error).__name__, 300)
        raise OnwardError(f"{what}{where}: {said}") from error


def _without_arguments(said: str) -> str:
    """A message without what Keras writes around it: the call, and its arguments."""
    found = re.search(r"\x1b\[1m(.*?)\x1b\[0m", said, re.DOTALL)
    return found[1] if found is not None else said


__all__ = ["layer_here", "layer_in", "refuse_model", "refuse_options", "refusing"]
