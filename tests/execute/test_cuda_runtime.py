"""Recordings of a CUDA device, beside a double of the rules that torch 2.13 has for their memory:
its classes CUDAGraph and CUDACachingAllocator, and its workspaces of cuBLAS. The last test needs a
device."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import tiny
import torch
from moments import pythons_handler

import onward
from onward.execute.runtime import CudaRuntime

OUTSIDE = 0  # the pool of memory that no recording has


class Device:
    """A device with two streams, which all who ask get in turn. recordings: how many live, by pool.
    workspaces: the pool in which the workspace of each stream lies. stream: the current one. now:
    the recording that is made. fails: where recordings fail. allocating: pools of which the
    allocator takes what is asked for, or of recordings that failed. draws: whether generators draw
    for a recording."""

    def __init__(self) -> None:
        self.recordings: dict[int, int] = {}
        self.workspaces: dict[int, int] = {}
        self.stream, self.fails, self.draws = 0, "", False
        self.allocating: set[int] = set()
        self.now: Recording | None = None
        self._streams = itertools.cycle((1, 2))
        self._pools = itertools.count(1)

    def next_stream(self, device: object) -> int:
        return next(self._streams)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def product(self) -> None:
        """A product on the current stream, whose workspace is allocated where it has none."""
        pool = OUTSIDE if self.now is None else self.now.of
        found = self.workspaces.setdefault(self.stream, pool)
        if self.now is not None:
            self.now.workspace = found

    @contextmanager
    def graph(
        self,
        graph: Recording,
        pool: int | None = None,
        stream: int = 1,
        capture_error_mode: str = "",
    ) -> Iterator[None]:
        """Leaves the thread on the stream where it raises, as torch.cuda.graph does."""
        assert capture_error_mode == "thread_local"
        self.synchronize(None)
        assert not self.allocating, "captures_underway.empty() INTERNAL ASSERT FAILED"
        before, self.stream = self.stream, stream
        if self.fails == "begin":
            raise RuntimeError("this thread records already")
        assert pool is not None
        graph.begin(pool)
        self.now, self.draws = graph, True
        self.allocating.add(pool)
        yield
        self.now = None
        if self.fails == "end":
            self.fails = ""
            raise RuntimeError("operation not permitted when stream is capturing")
        self.allocating.remove(pool)
        graph.ended, self.draws = True, False
        self.stream = before

    def synchronize(self, device: object) -> None:
        assert self.now is None, "waiting for the device ends the recording of another thread"

    def end_allocations(self, device: int, pool: int) -> None:
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)


class Recording:
    """A graph. workspace: the pool in which its products write."""

    def __init__(self, device: Device) -> None:
        self.device, self.of, self.stream, self.ended = device, OUTSIDE, 0, False
        self.workspace: int | None = None

    def begin(self, pool: int) -> None:
        held = self.device.recordings
        assert held.get(pool) != 0, "it->second->use_count > 0 INTERNAL ASSERT FAILED"
        held[pool] = held.get(pool, 0) + 1
        self.of, self.stream = pool, self.device.stream

    def pool(self) -> int:
        return self.of

    def replay(self) -> None:
        assert self.workspace in (None, self.of), "a replay writes to memory of others"

    def reset(self) -> None:
        if self.ended:
            self.device.workspaces.pop(self.stream, None)
            self.device.recordings[self.of] -= 1
            self.ended = False

    __del__ = reset


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found, plain = Device(), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, device: plain(*a))
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    for name, double in {
        "CUDAGraph": lambda: Recording(found),
        "graph": found.graph,
        "Stream": found.next_stream,
        "stream": found.on,
        "current_stream": lambda device: found.stream,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "graph_pool_handle": lambda: next(found._pools),
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end_allocations, raising=False)
    return found


def made() -> CudaRuntime:
    return CudaRuntime(torch.device("cuda", 0))


def recorded(runtime: CudaRuntime, device: Device) -> Any:
    """A recording of one product."""
    return runtime.recorded([device.product])


def test_a_pool_that_all_recordings_have_left_is_not_used_again(device: Device) -> None:
    """Memory that moves drops all recordings of a session at once."""
    runtime = made()
    first, second = (recorded(runtime, device) for _ in range(2))
    assert first.__self__.of == second.__self__.of, "recordings share a pool while one lives"
    left = first.__self__.of
    del first, second
    third = recorded(runtime, device)
    assert third.__self__.of != left
    third()


def test_no_recording_writes_to_memory_of_others(device: Device) -> None:
    """Three sessions on two streams, whose recordings come and go; others compute on these."""
    runtimes = [made() for _ in range(3)]
    kept: list[Any] = []
    for number in range(24):
        with device.on(1 + number % 2):
            device.product()
        kept.append(recorded(runtimes[number % 3], device))
        assert device.workspaces.get(kept[-1].__self__.stream) is None, "others write to it"
        for replay in kept:
            replay()
        if number % 4 == 3:
            kept.pop(0)
        if number % 7 == 6:
            kept.clear()


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_recording_that_fails_leaves_the_thread_on_its_stream(fails: str, device: Device) -> None:
    runtime = made()
    device.fails = fails
    with device.on(7):
        with pytest.raises(RuntimeError):
            runtime.recorded([])
        assert device.stream == 7


@pytest.mark.parametrize("others", [0, 2])
def test_after_a_recording_that_fails_others_can_be_made(others: int, device: Device) -> None:
    """Up to 2.12, PyTorch goes on allocating for it, and its generators go on drawing for it."""
    runtime = made()
    kept = [recorded(runtime, device) for _ in range(others)]
    failing = [lambda: setattr(device, "fails", "end")]
    with pytest.raises(RuntimeError, match="stream is capturing"):
        runtime.recorded(failing)
    assert not device.allocating and not device.draws
    kept += [recorded(runtime, device), recorded(made(), device)]
    for replay in kept:
        replay()


def test_nothing_disturbs_a_recording(device: Device) -> None:
    """Neither Python's collector, which may destroy other recordings, nor the handler of a signal,
    nor other threads that record or wait for the device."""
    runtimes, seen, failed = [made() for _ in range(2)], [], []

    def interrupted() -> None:
        assert not gc.isenabled()
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        seen.append(device.now)

    def records() -> None:
        try:
            for _ in range(20):
                runtimes[1].recorded([interrupted, lambda: time.sleep(1e-3)])
                runtimes[0].wait()
        except BaseException as error:
            failed.append(error)

    other = threading.Thread(target=records)
    with pythons_handler():
        other.start()
        for _ in range(20):
            with pytest.raises(KeyboardInterrupt):
                runtimes[0].recorded([interrupted, lambda: time.sleep(1e-3)])
        other.join()
    assert not failed and len(seen) == 40 and None not in seen and gc.isenabled()


class Stream:
    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


def test_a_run_on_another_stream_waits_for_the_run_before(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs write to the same memory, whichever stream they are on."""
    runtime, one, two = made(), Stream(), Stream()
    for stream in (one, one, two, two, one):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, s=stream: s)
        with runtime.current():
            pass
    assert one.waited == [two] and two.waited == [one]


# ---- with a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_stay_right_while_memory_grows_beside_another_trainer() -> None:
    """Small batches, large ones and small ones again, each size recorded and replayed."""
    sizes = [(4, 12)] * 3 + [(16, 40)] * 3 + [(4, 12)] * 3

    def losses(records: bool) -> list[torch.Tensor]:
        trainers: list[onward.Trainer] = []
        for _ in range(2):
            torch.manual_seed(0)
            model: Any = tiny.gpt2(0.0)
            model.to("cuda")
            trainers.append(onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05)))
            trainers[-1].memory.runtime.records = records
        found: list[torch.Tensor] = []
        for number, size in enumerate(sizes):
            torch.manual_seed(number)
            data = {n: x.cuda() for n, x in tiny.batch(*size).items()}
            found += [trainer.train_step(data).loss.clone() for trainer in trainers]
            if number == 5:
                del trainers[0]  # with its recordings; the other goes on
        return found

    for x, y in zip(losses(True), losses(False), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
