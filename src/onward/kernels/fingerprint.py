"""Fingerprint: identifies the kernels of this process, for graphs that are cached on disk."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onward.environment import environment
from onward.kernels.blas.choice import processor_name
from onward.kernels.blas.engines import engines
from onward.kernels.native.library import library
from onward.kernels.target import Target


def fingerprint(target: Target) -> dict[str, Any]:
    """The facts that decide the kernels, by name: the target, the library's bytes, engines,
    threads, versions, and the processor, whose arithmetic decides the last bits of folded
    constants."""
    native = library() if target.has_library else None
    return {
        "target": repr(target),
        "library": None if native is None else _digest(native.path, native.path.stat().st_mtime_ns),
        "engines": sorted((name, engine.path) for name, engine in engines().items()),
        "blas": environment().blas,
        "threads": torch.get_num_threads(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "numpy": np.__version__,
        "processor": [platform.machine(), _processor(), torch.backends.cpu.get_cpu_capability()],
    }


@functools.cache
def _processor() -> str:
    return processor_name()


@functools.lru_cache(maxsize=8)
def _digest(path: Path, changed: int) -> str:
    """The digest of a file. changed: its modification time, a cache key that tells a new file of
    the same name."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


__all__ = ["fingerprint"]
