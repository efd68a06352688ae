"""Tensors in the strides of their parameter, for torch's own code.

Step graphs keep gradients and optimizer state row by row, whatever a parameter's strides. PyTorch
gives them the strides of a parameter that lies densely in memory (transposed, channels last), and
its fused updates rely on that: they walk the memory of all these tensors in one order.
"""

from __future__ import annotations

import torch


def is_turned(parameter: torch.Tensor) -> bool:
    """Whether a parameter fills its memory in another order than row by row."""
    if parameter.layout is not torch.strided or parameter.is_contiguous():
        return False
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()


def turned_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's shape in the strides of the parameter, a copy unless it has them
    already. Returns a tensor of another shape as it is, and one of a parameter with gaps."""
    if tensor.shape != parameter.shape or tensor.stride() == parameter.stride():
        return tensor
    if not is_turned(parameter):
        return tensor
    shape, strides = parameter.shape, parameter.stride()
    made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


__all__ = ["is_turned", "turned_like"]
