"""The device of a model, which is that of its first parameter."""

from __future__ import annotations

import torch

from onward.errors import CaptureError

_COMPUTING = ("cpu", "cuda", "meta")  # tensors on meta are refused by name, where they are read


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of a model's first parameter; the CPU for a model without parameters."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def computing_device(model: torch.nn.Module) -> torch.device:
    """The device of a model's first parameter. Raises CaptureError as `require_computing` does."""
    device = device_of(model)
    require_computing(device)
    return device


def require_computing(device: torch.device) -> None:
    """Raises CaptureError for a device of a kind on which Onward does not compute
    (docs/notes/0086-gpus-of-apple-and-intel.md)."""
    if device.type not in _COMPUTING:
        raise CaptureError(
            f"the parameters are on {device}, and Onward computes on CPUs and CUDA devices alone; "
            'fix: model.to("cpu")'
        )


__all__ = ["computing_device", "device_of", "require_computing"]
