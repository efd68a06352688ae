"""The device that a run trains on: a CUDA device where one is here, else the CPU."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from onward.errors import OnwardError
from onward.execute.shortage import free_bytes, is_shortage
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.started_processes import local_rank, sees_a_gpu_of_its_own

if TYPE_CHECKING:
    pass

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # of exchanges between processes


def training_device(config: FinetuneConfig) -> torch.device:
    """The device of this process; of those that were started on one machine each has a GPU of its
    own: the one that its launcher lets it see, or that of its number. Raises InputError where
    there are fewer GPUs than processes, and for TF32 on a CPU."""
    if config.use_cpu or not torch.cuda.is_available():
        if config.tf32:
            raise InputError(
                "TF32 is a precision of GPUs, and this run has none",
                "in --tf32",
                "leave it out",
            )
        return torch.device("cpu")
    number, here = local_rank(), torch.cuda.device_count()
    if here == 1 and sees_a_gpu_of_its_own():
        number = 0
    if number >= here:
        raise InputError(
            f"process {number} of this machine has no GPU: it sees {here}",
            "in the number of processes",
            f"torchrun --nproc-per-node={here}, a CUDA_VISIBLE_DEVICES that names a GPU for each "
            "process, or --use_cpu true",
        )
    return torch.device("cuda", number)


def take_device(config: FinetuneConfig) -> torch.device:
    """Makes the device of this process the one that PyTorch takes, with products of fp32 in TF32
    where the options ask for it; returns it. Raises what `training_device` raises."""
    device = training_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.tf32:
            torch.set_float32_matmul_precision("high")
    return device


def moved(batch: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """A batch with its tensors on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def device_line(device: torch.device) -> str:
    """A device with the name of the GPU, for a reader."""
    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


@contextmanager
def telling_shortages(device: torch.device, when: str, fix: str) -> Generator[None]:
    """A context that raises OnwardError, in one line, where PyTorch cannot allocate memory in it.
    when, fix: of its message."""
    try:
        yield
    except OnwardError:  # Onward's own say what the step needs
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        raise OnwardError(f"out of memory on {device}, {when}; fix: {fix}") from error


def free_memory(device: torch.device) -> int:
    """Bytes of a device's memory that new tensors may have; of the CPU the host's."""
    found = free_bytes(device) if device.type == "cuda" else None
    if found is not None:
        return found
    import psutil

    return psutil.virtual_memory().available


def reset_peak(device: torch.device) -> None:
    """Forgets the largest memory so far that PyTorch has held on a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_mib(device: torch.device) -> float | None:
    """The largest memory that PyTorch's tensors took on a GPU since `reset_peak`, MiB; None of the
    CPU, where it is part of the process."""
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None


__all__ = [
    "BACKENDS", "device_line", "free_memory", "moved", "peak_mib", "reset_peak",
    "take_device", "telling_shortages", "training_device",
]  # fmt: skip
