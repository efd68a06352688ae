"""CaptureRequest: the call to capture, and what its graph has to provide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

LossFunction: TypeAlias = Callable[..., torch.Tensor]


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """One call of a model, and of the loss after it, that is to become a graph.

    model: the module that is called; its training flags and its parameters' `requires_grad` are
    read when it is captured. `refuse_model` validates it, together with the loss function.
    args, kwargs: the call's arguments: tensors of any shape in any tree that pytree knows, numbers,
    strings, None. Sizes above 1 become symbols; whatever is no tensor is baked in. Dtypes are
    validated before the trace (`onward.capture.stages`), the rest by it.
    target: the loss function's arguments after the model's outputs; may be empty.
    loss_fn: `loss_fn(outputs, *target) -> f32[]`; None where the model returns its loss itself, as
    the output `loss` or as the only one. The traced call validates that the loss is a scalar.
    want_loss: whether the graph has the loss as an output. Where it has not, its outputs are the
    model's, and `loss_fn` and `target` are not called.
    gradients: whether gradients are asked for; None means as in `model.training`.
    whole: whether the structure of the model's return value is kept, so that results can be
    returned as the model returns them (`CapturedModule.tree`).
    presumes: whether the graph may be for batches whose attention masks show every query a key,
    which the caller checks on each; otherwise it is for all masks, where PyTorch is right for all.
    regions: whether parts that cannot be captured run in PyTorch, as ops of the graph
    (`CapturedModule.regions`); otherwise they are refused.
    autocast: bfloat16 or float16, to which `torch.autocast` casts around the call; None where it is
    off. The call is traced under it, but the graph is fp32: each node records the precision of its
    products (`graph.precision_said`). The caller validates the dtype.

    Nothing is validated when a request is made; `capture` raises CaptureError.
    """

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: tuple[Any, ...] = ()
    loss_fn: LossFunction | None = None
    want_loss: bool = True
    gradients: bool | None = None
    whole: bool = False
    presumes: bool = True
    regions: bool = False
    autocast: torch.dtype | None = None

    @property
    def differentiated(self) -> bool:
        """Whether gradients are asked for; where `gradients` is None, whether the model trains."""
        return self.model.training if self.gradients is None else self.gradients

    @property
    def trains(self) -> bool:
        """Whether parameters get gradients, from the loss or from the results of a whole call."""
        return self.differentiated and (self.want_loss or self.whole)


__all__ = ["CaptureRequest", "LossFunction"]
