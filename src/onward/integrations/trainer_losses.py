"""The loss of a step, as `compute_loss` of transformers' Trainer computes it."""

from __future__ import annotations

from typing import Any

import torch

from onward.errors import CaptureError


def model_loss(outputs: Any) -> torch.Tensor:
    """The model's own loss: `loss` of a dict, or the first output. Raises CaptureError for a dict
    without one."""
    if isinstance(outputs, dict):
        if "loss" not in outputs:
            raise CaptureError(f"the model returns {', '.join(outputs)} but no loss")
        return outputs["loss"]
    return outputs[0]


def own_loss(own: Any, outputs: Any, given: tuple[Any, Any]) -> torch.Tensor:
    """The loss by the user's `compute_loss_func`. given: labels, and the number of items in the
    accumulation window."""
    labels, items = given
    return own(outputs, labels, num_items_in_batch=items)


def smoothed_loss(
    smoother: Any, shifts: bool, outputs: Any, given: tuple[Any, Any]
) -> torch.Tensor:
    """The loss with `label_smoothing_factor`. given: labels, and the number of items in the
    accumulation window."""
    labels, items = given
    shifted = {"shift_labels": True} if shifts else {}
    counted = {} if items is None else {"num_items_in_batch": items}
    return smoother(outputs, labels, **shifted, **counted)


def scaled_loss(loss: Any, factor: float, outputs: Any, *given: Any) -> torch.Tensor:
    """The loss by one of the functions above, times a factor."""
    return loss(outputs, *given) * factor


__all__ = ["model_loss", "own_loss", "scaled_loss", "smoothed_loss"]
