"""Errors for memory that cannot be allocated: what a plan needs, what there is, what is large."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Generator, Sequence
from pathlib import Path

import torch

from onward.errors import OutOfMemoryError
from onward.memory_amounts import mib
from onward.plan import Buffer, MemoryRegion, Plan

FIX = "a smaller batch, or memory_budget"
MOST = 5  # buffers that are named
# what torch says where malloc fails; on a GPU it has a class of its own
_SAID = (
    "DefaultCPUAllocator", "can't allocate memory", "not enough memory", "error: out of memory",
)  # fmt: skip


def is_shortage(error: BaseException) -> bool:
    """Whether an exception says that memory could not be allocated."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)


@contextlib.contextmanager
def naming_shortages(plan: Plan, device: torch.device) -> Generator[None]:
    """A context that raises OutOfMemoryError, with what the plan needs, for memory that cannot be
    allocated in it."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.plan is None:
            raise shortage(plan, device, str(error)) from error
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        raise shortage(plan, device, "out of memory") from error


def shortage(
    plan: Plan, device: torch.device, said: str, ways: Sequence[str] = (), fix: str = FIX
) -> OutOfMemoryError:
    """The error with what the plan needs, what there is, the largest buffers and lines on the ways
    out."""
    sizes = plan.sizes
    lines = [
        f"  planned: {mib(plan.peak)} beyond the weights: {mib(sizes[MemoryRegion.PERSISTENT])} "
        f"that stay, {mib(plan.arena_bytes)} of activations and temporaries, {mib(plan.workspace)} "
        "inside kernels"
    ]
    held, free = held_bytes(device), free_bytes(device)
    if held is not None and free is not None:
        lines.append(f"  measured: the process holds {mib(held)}, and {mib(free)} are free")
    largest = sorted(plan.buffers, key=lambda b: -b.nbytes)
    named = [b for b in largest if b.region is not MemoryRegion.USER][:MOST]
    lines += [f"  {mib(b.nbytes):>12}  {_place(plan, b)}" for b in named]
    made = OutOfMemoryError("\n".join([said, *lines, *ways, f"fix: {fix}"]))
    made.plan, made.said = plan, said
    return made


def _place(plan: Plan, buffer: Buffer) -> str:
    """A buffer's purpose, with the op and the module that write it."""
    made = [x for x in plan.launches if any(y.buffer == buffer.index for y in x.outputs)]
    if not made:
        return f"{buffer.purpose} {buffer.name}"
    first = made[0]
    where = f" of {first.module}" if first.module not in ("", "(top)") else ""
    return f"{buffer.purpose}: {first.op}{where}{', in backward' if first.backward else ''}"


def held_bytes(device: torch.device) -> int | None:
    """The bytes that this process holds: resident ones, or those of PyTorch on a GPU; None where
    the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return None


def free_bytes(device: torch.device) -> int | None:
    """The bytes that this process may still allocate: the least of what the machine has, a
    container's limit leaves and the process's own limit; on a GPU what nobody has, and what
    PyTorch's allocator keeps for new tensors. None where the system does not tell."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        [line] = [x for x in lines if x.startswith("MemAvailable:")]
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup")
        limit = int((folder / "memory.max").read_text())  # "max" is no number
        found.append(limit - int((folder / "memory.current").read_text()))
    with contextlib.suppress(OSError, ValueError, ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            found.append(limit - mapped)
    return max(0, min(found)) if found else None


__all__ = ["free_bytes", "held_bytes", "is_shortage", "naming_shortages", "shortage"]
