"""Runtime: what the host asks of a device besides launches: to wait, and to record launches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onward.kernels.kernel import Launch

_ANY_DEVICE = nullcontext()  # made once, since it is entered around each run


class Runtime:
    """The runtime of a device that runs each launch at once, as a CPU does. records: whether
    launches can be recorded, to be queued again in one call. refusals: why launches could not be,
    as the user has been told."""

    records = False

    def __init__(self) -> None:
        self.refusals: set[str] = set()

    def current(self) -> AbstractContextManager[object]:
        """A context in which this device is the current one of the thread, as launches need it."""
        return _ANY_DEVICE

    def wait(self) -> None:
        """Waits until the device has run all that is queued."""

    def put(self, content: torch.Tensor, place: torch.Tensor) -> None:
        """Copies a tensor of the user's to its place on the device, behind what is queued there;
        afterwards the tensor may change."""
        place.copy_(content)

    def recorded(self, launches: Sequence[Launch]) -> Launch:
        """Records launches without running them, and returns the call that queues all of them. The
        memory that they read and write must stay where it is. Raises RuntimeError where one of them
        cannot be recorded."""
        raise RuntimeError("this device does not record launches")


class CudaRuntime(Runtime):
    """The runtime of a CUDA device. Source: CUDA Graphs,
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs."""

    records = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._pool: Any = None  # of what launches allocate themselves; shared by all recordings

    def current(self) -> AbstractContextManager[object]:
        # Triton launches on the current device, and a stream records what is queued on its own
        # device alone; aten's operators go to the device of their tensors in any case.
        return torch.cuda.device(self._device)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def put(self, content: torch.Tensor, place: torch.Tensor) -> None:
        if content.device.type != "cpu" or place.device.type == "cpu":
            place.copy_(content)
            return
        # From memory that the system may move, the host would wait for all that is queued, such as
        # the update before. PyTorch's allocator keeps pinned memory until the copy has been made.
        staged = _pinned(content.shape, place.dtype).copy_(content)
        place.copy_(staged, non_blocking=True)

    def recorded(self, launches: Sequence[Launch]) -> Launch:
        graph = torch.cuda.CUDAGraph()
        # Recordings may share a pool in any order of replays, since nothing that a launch allocates
        # is read by a later replay.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            for launch in launches:
                launch()
        self._pool = graph.pool()
        return graph.replay


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


def runtime_of(device: torch.device) -> Runtime:
    """The runtime of a device."""
    return CudaRuntime(device) if device.type == "cuda" else Runtime()


__all__ = ["CudaRuntime", "Runtime", "runtime_of"]
