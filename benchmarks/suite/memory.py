"""How much memory a process holds: its resident set, or what its GPU's allocator has given out."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path


class Memory:
    """Peak memory of this process on the CPU, or of the allocator on a GPU, in bytes."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.resettable = True
        self._status = Path("/proc/self/status")

    def _read(self, key: str) -> int:
        for line in self._status.read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise KeyError(key)

    def resident(self) -> int:
        """The resident set, freed heap included."""
        return self._read("VmRSS")

    def now(self) -> int:
        """Memory in use: resident set, or live tensors on the GPU."""
        import torch

        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        with contextlib.suppress(AttributeError):  # not glibc
            # Freed heap would serve the first tensors unseen, and hide them from the peak.
            ctypes.CDLL(None).malloc_trim(0)
        return self.resident()

    def reset_peak(self) -> None:
        """Start a new peak; where the kernel refuses, peaks cover the process's whole life."""
        import torch

        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.resettable = False

    def peak(self) -> int:
        """The highest use since the last reset."""
        import torch

        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return self._read("VmHWM")
