"""The device of a model, which is that of its first parameter."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

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


def cuda_devices(*tensors: Iterable[torch.Tensor]) -> list[int]:
    """The numbers of the CUDA devices that tensors are on: those for `torch.random.fork_rng`, which
    otherwise initializes every device of the machine and warns where there are several."""
    return sorted({t.get_device() for each in tensors for t in each if t.is_cuda})


def keeping_generators(*tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """A context after which the random generators of the CPU and of the devices that tensors are on
    go on as before."""
    return torch.random.fork_rng(cuda_devices(*tensors))


def require_computing(device: torch.device) -> None:
    """Raises CaptureError for a device of a kind on which Onward does not compute
    (docs/notes/0086-gpus-of-apple-and-intel.md)."""
    if device.type not in _COMPUTING:
        raise CaptureError(
            f"the parameters are on {device}, and Onward computes on CPUs and CUDA devices alone; "
            'fix: model.to("cpu")'
        )


__all__ = [
    "computing_device", "cuda_devices", "device_of", "keeping_generators", "require_computing",
]  # fmt: skip
