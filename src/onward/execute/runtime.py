"""Runtime: what the host asks of a device besides launches: to wait, and to record launches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from onward.forks import Lock
from onward.kernels.kernel import Launch
from onward.signals import signals_wait
from onward.uncollected import uncollected

_CORE: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_ANY_DEVICE = nullcontext()  # made once, since it is entered around each run
# Whoever waits for a whole device ends the recordings on it that other threads are making.
_ONE_AT_A_TIME = Lock()


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

    def settings(self) -> Hashable:
        """PyTorch's settings that recordings of launches hold: where one changes, launches are to
        be bound and recorded anew."""
        return _settings() if self.records else None

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
        self._stream: Any = None  # that recordings are made on
        self._pool: Any = None  # of what launches allocate themselves; shared by all recordings
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()  # the recordings that there are
        self._last: Any = None  # the stream of the last run

    @contextmanager
    def current(self) -> Generator[None]:
        # Triton launches on the current device, and a stream records what is queued on its own
        # device alone; aten's operators go to the device of their tensors in any case.
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None and stream != self._last:
                stream.wait_stream(self._last)  # the memory of runs is the same on all streams
            self._last = stream
            yield

    def wait(self) -> None:
        synchronize(self._device)

    def put(self, content: torch.Tensor, place: torch.Tensor) -> None:
        if content.device.type != "cpu" or place.device.type == "cpu":
            place.copy_(content)
            return
        # From memory that the system may move, the host would wait for all that is queued, such as
        # the update before. PyTorch's allocator keeps pinned memory until the copy has been made.
        staged = _pinned(content.shape, place.dtype).copy_(content)
        place.copy_(staged, non_blocking=True)

    def recorded(self, launches: Sequence[Launch]) -> Launch:
        # A collection of garbage may destroy another recording, and a signal's handler may raise
        # between the start of a recording and its end: both would end it.
        with _ONE_AT_A_TIME, signals_wait(), uncollected(), torch.cuda.device(self._device):
            self._stream = stream = self._stream or torch.cuda.Stream(self._device)
            graph, live = torch.cuda.CUDAGraph(), list(self._live)
            # Recordings may share a pool in any order of replays, since nothing that a launch
            # allocates is read by a later replay. A pool that all its recordings have left is
            # refused.
            pool = self._pool if live and self._pool else torch.cuda.graph_pool_handle()
            self._pool = None  # the pool of a recording that fails is not used again
            self._free_workspaces(stream)
            try:
                self._record(launches, graph, stream, pool)
            except RuntimeError:
                with suppress(RuntimeError):  # one that succeeds has generators draw outside again
                    self._free_workspaces(stream)
                raise
            self._free_workspaces(stream)
            self._pool = pool
            self._live.add(graph)
            return graph.replay

    def _record(self, launches: Sequence[Launch], graph: Any, stream: Any, pool: Any) -> None:
        """Records launches into a graph. Where that fails, the thread is on its own stream again,
        and PyTorch's allocator can be used as before."""
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                with _recording(graph, stream, pool):
                    for launch in launches:
                        launch()
            except RuntimeError:
                _end_allocations(pool)
                raise

    def _free_workspaces(self, stream: Any) -> None:
        """Frees what cuBLAS writes to on a stream, so that its next product there allocates it.

        PyTorch keeps one such workspace for a stream, and frees it with any recording that was made
        on the stream, though others may hold its address; and streams of PyTorch are few, so that
        others may have the same one. Between two calls of this method a recording allocates its
        workspace in its own pool, where the address is nobody else's while it lives. PyTorch
        frees the workspaces of one stream only where it destroys a recording.
        """
        content = torch.empty(1, device=self._device)  # an empty recording is warned of
        graph = torch.cuda.CUDAGraph()
        self._record([content.zero_], graph, stream, torch.cuda.graph_pool_handle())
        graph.reset()


def synchronize(device: torch.device) -> None:
    """Waits until a CUDA device has run all that is queued, and until no thread records."""
    with _ONE_AT_A_TIME:
        torch.cuda.synchronize(device)


def _end_allocations(pool: Any) -> None:
    """Ends the allocations of a recording that has failed. Up to 2.12, PyTorch's allocator goes on
    with them, and then refuses to empty its cache (https://github.com/pytorch/pytorch/pull/180395).
    Later versions have ended them, and refuse to do so again."""
    end: Callable[[int, Any], None] | None = getattr(_CORE, "_cuda_endAllocateToPool", None)
    if end is not None:
        with suppress(RuntimeError):
            end(torch.cuda.current_device(), pool)


def _recording(graph: Any, stream: Any, pool: Any = None) -> AbstractContextManager[None]:
    """A context that records into a graph what this thread launches; other threads are free to do
    as they like."""
    return torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")


def _settings() -> Hashable:
    """How products and convolutions are computed, from whichever interface it was set by."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        products.fp32_precision,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_accumulation,
        cudnn.conv.fp32_precision,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)


def runtime_of(device: torch.device) -> Runtime:
    """The runtime of a device."""
    return CudaRuntime(device) if device.type == "cuda" else Runtime()


__all__ = ["CudaRuntime", "Runtime", "runtime_of", "synchronize"]
