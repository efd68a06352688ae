"""A recording double of a CUDA device: plans for CUDA run on tensors of the CPU, and the double
records launches as a CUDA graph does, at once tighter and without a device.

While it records, no operator that writes is executed. A recording holds no memory of others alive:
a replay after an arena has moved fails. What a launch allocates while it is recorded belongs to the
recording, as in a graph's private pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from onward import compile as stages
from onward.execute.runtime import Runtime
from onward.kernels import Target

CUDA = Target("cuda", multiplies_bf16=True, multiplies_fp16=True, capability=(9, 0))
# Operators whose result, or its size, is known on the host alone: a device is waited for.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


class Held:
    """A tensor of others, without keeping its memory alive."""

    def __init__(self, x: torch.Tensor) -> None:
        self._storage = StorageWeakRef(x.untyped_storage())
        self._like = (x.dtype, x.storage_offset(), x.shape, x.stride())

    def tensor(self) -> torch.Tensor:
        assert not self._storage.expired(), "a replay touches memory that was freed"
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        dtype, offset, shape, stride = self._like
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class _Recorded(TorchDispatchMode):
    """Records operators. calls: what to do at a replay. own: storages that were allocated here."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self.own: set[int] = set()
        self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"a launch waits for the device: {name}"
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in _arguments(func))
        if not writes and any(r.alias_info is not None for r in func._schema.returns):
            return func(*args, **kwargs)  # a view
        held = tree_map_only(torch.Tensor, self._held, (args, kwargs))
        if writes:
            self.calls.append(lambda: _run(func, held))
            return _written(func, args, kwargs)
        made = _unwritten(func, args, kwargs)
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor):
                self.own.add(x.untyped_storage().data_ptr())
                self.allocated += x.nbytes
        self.calls.append(lambda: _copied(made, _run(func, held)))
        return made

    def _held(self, x: torch.Tensor) -> torch.Tensor | Held:
        return x if x.untyped_storage().data_ptr() in self.own else Held(x)


def _arguments(func: Any) -> Sequence[Any]:
    return func._schema.arguments


def _unwritten(func: Any, args: Any, kwargs: Any) -> Any:
    """Memory for the results of an operator that is not executed."""
    around = tree_map_only(
        torch.Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs)
    )
    made = func(*around[0], **around[1])
    return tree_map_only(torch.Tensor, lambda x: torch.empty_like(x, device="cpu"), made)


def _run(func: Any, held: Any) -> Any:
    args, kwargs = tree_map_only(Held, Held.tensor, held)
    return func(*args, **kwargs)


def _copied(made: Any, again: Any) -> None:
    pairs = zip(made, again, strict=True) if isinstance(made, (tuple, list)) else [(made, again)]
    for x, y in pairs:
        if isinstance(x, torch.Tensor):
            x.copy_(y)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator returns that writes its arguments: these."""
    named = dict(zip([a.name for a in _arguments(func)], args, strict=False)) | kwargs
    found = [
        named[a.name]
        for a in _arguments(func)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    if not func._schema.returns:
        return None
    return found[0] if len(func._schema.returns) == 1 else tuple(found)


class DoubleRuntime(Runtime):
    """A device that records. recordings, replays: how many there were. fails: whether launches
    cannot be recorded. allocated: bytes that launches allocated while they were recorded."""

    records = True

    def __init__(self) -> None:
        super().__init__()
        self.recordings = self.replays = self.allocated = self.waits = 0
        self.launches = 0  # of all recordings
        self.fails = self.is_current = False

    @contextmanager
    def current(self) -> Iterator[None]:
        self.is_current = True
        try:
            yield
        finally:
            self.is_current = False

    def wait(self) -> None:
        self.waits += 1

    def recorded(self, launches: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        assert self.is_current, "launches are recorded while another device is the current one"
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        with _Recorded() as mode:
            for launch in launches:
                launch()
        self.recordings += 1
        self.launches += len(launches)
        self.allocated += mode.allocated
        calls = mode.calls

        def replay() -> None:
            assert self.is_current, "a recording is replayed while another device is the current"
            self.replays += 1
            for call in calls:
                call()

        return replay


@contextmanager
def planned_for_cuda(double: Runtime | None, target: Target = CUDA) -> Iterator[None]:
    """Within it, compilers plan for a CUDA device, and memory has the runtime `double`; None: one
    that records nothing."""
    as_given = stages.Compiler.__init__

    def compiler(self: Any, _: Target, *args: Any, **options: Any) -> None:
        as_given(self, target, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONWARD_CACHE", "")  # kept graphs are those of other targets
        patch.setattr(stages.Compiler, "__init__", compiler)
        patch.setattr("onward.execute.memory.runtime_of", lambda _: double or Runtime())
        # the memory of a device, which all accelerated models share
        patch.setattr(import_module("onward.module.accelerate"), "_MEMORIES", {})
        yield
