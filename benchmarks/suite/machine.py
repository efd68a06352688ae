"""What the numbers were measured on: processor, versions, commit, command line."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxruntime", "numpy", "triton", "onward")


def machine(device: str, threads: int = 0) -> dict[str, Any]:
    """What the numbers were measured on; `threads` where they are not torch's default."""
    import psutil
    import torch

    model = platform.processor()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpu = {}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        gpu = {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": psutil.getloadavg()[0],
        **gpu,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit measured, marked when the tree held changes; empty outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip()


def command() -> str:
    """The command line, with files by their names: this machine's folders say nothing elsewhere."""
    words = [
        flag + equals + Path(value).name
        for flag, equals, value in (word.rpartition("=") for word in sys.argv[1:])
    ]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
