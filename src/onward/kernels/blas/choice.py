"""Which engine for which shape: measured once per machine, kept as data.

A handful of sample products, one per class of shape that training meets, is timed on every engine
(a third of a second). A product takes the engine that won on the nearest sample: the same storage
of its operands, nearest in log m, n, k. The table is a JSON file in the user's cache folder; its
name holds processor, thread count and versions, so that a change of any measures anew.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from onward.config import OnwardError, environment
from onward.kernels.blas.engines import engines, plain_product

log = logging.getLogger("onward")
TORCH = "torch"  # torch.mm with its own threads
_REPEATS = 4


class Shape(NamedTuple):
    """`f32[m,n] = f32[m,k] f32[k,n]`; ta, tb: the operand is stored transposed."""

    m: int
    n: int
    k: int
    ta: bool = False
    tb: bool = False

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}{' ta' if self.ta else ''}{' tb' if self.tb else ''}"


# One per class: a layer's products, wide ones, a vocabulary's (odd sizes, as vocabularies are), and
# small ones; forward, by the input, by the weight.
SAMPLES = (
    *(
        Shape(m, n, k, ta, tb)
        for m, n, k in (
            (64, 64, 64), (256, 128, 128), (700, 200, 200), (512, 512, 512), (512, 1024, 256),
            (512, 256, 1024),
        )
        for ta, tb in ((False, True), (False, False), (True, False))
    ),
    Shape(256, 8193, 128, False, True),
    Shape(256, 128, 8193, False, False),
    Shape(8193, 128, 256, True, False),
)  # fmt: skip


def choose(shape: Shape) -> str:
    """The engine's name: one of `engines()`, or "torch"."""
    return forced() or _nearest(shape, torch.get_num_threads(), (TORCH, *engines()))


def choose_called(shape: Shape) -> str:
    """The same among the engines that a kernel can call from its own threads."""
    name = forced()
    if name in engines():
        return name
    return _nearest(shape, torch.get_num_threads(), tuple(engines()))


def forced() -> str:
    """The engine that the environment asks for; empty where it does not."""
    name = environment().blas
    if name and name != TORCH and name not in engines():
        have = ", ".join([TORCH, *engines()])
        raise OnwardError(f"ONWARD_BLAS={name} is not there; fix: one of {have}")
    return name


@functools.lru_cache(maxsize=4096)
def _nearest(shape: Shape, threads: int, names: tuple[str, ...]) -> str:
    table = rates(threads)
    if not table:
        return TORCH
    alike = [s for s in table if (s.ta, s.tb) == (shape.ta, shape.tb)] or list(table)

    def distance(sample: Shape) -> float:
        pairs = zip(sample[:3], shape[:3], strict=True)
        return sum(math.log(a / max(b, 1)) ** 2 for a, b in pairs)

    found = table[min(alike, key=distance)]
    return max(names, key=lambda name: found[name])


@functools.cache
def rates(threads: int) -> dict[Shape, dict[str, float]]:
    """GFLOP/s by sample and engine, from the file or measured now. Empty without an engine."""
    if not engines():
        return {}
    path = _file(threads)
    table = _read(path)
    if table is None:
        table = measure()
        _write(path, table)
    return table


def measure() -> dict[Shape, dict[str, float]]:
    """Times every sample on every engine, in turn; the best of a few runs each."""
    table: dict[Shape, dict[str, float]] = {}
    for shape in SAMPLES:
        calls = _calls(shape)
        best = dict.fromkeys(calls, math.inf)
        for _ in range(_REPEATS):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
        flops = 2 * shape.m * shape.n * shape.k
        table[shape] = {name: round(flops / s / 1e9, 1) for name, s in best.items()}
    return table


def _calls(shape: Shape) -> dict[str, Callable[[], Any]]:
    m, n, k, ta, tb = shape
    a = torch.from_numpy(np.random.default_rng(0).standard_normal((m, k), np.float32))
    b = torch.from_numpy(np.random.default_rng(1).standard_normal((k, n), np.float32))
    left = a.t().contiguous() if ta else a
    right = b.t().contiguous() if tb else b
    y = torch.empty(m, n)
    calls: dict[str, Callable[[], Any]] = {
        TORCH: functools.partial(
            torch.mm, left.t() if ta else left, right.t() if tb else right, out=y
        )
    }
    for name, engine in engines().items():
        calls[name] = plain_product(engine, left, right, ta, tb, y)
    return calls


def _file(threads: int) -> Path:
    parts = (
        _processor(), f"{threads}threads", f"torch{torch.__version__}", f"numpy{np.__version__}",
        f"samples{len(SAMPLES)}",
    )  # fmt: skip
    name = "-".join("".join(c if c.isalnum() or c in ".+" else "_" for c in p) for p in parts)
    return environment().cache / "products" / f"{name}.json"


def _processor() -> str:
    """The processor's model with its instruction level: virtual machines of one name may differ."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model} {torch.backends.cpu.get_cpu_capability()}"


def _read(path: Path) -> dict[Shape, dict[str, float]] | None:
    """The kept table; None where it is absent, damaged, or of other engines than there are."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rates"]
        table = {Shape(*row["shape"]): dict(row["gflops"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    names = {TORCH, *engines()}
    return table if table and all(set(found) == names for found in table.values()) else None


def _write(path: Path, table: dict[Shape, dict[str, float]]) -> None:
    """Keeps the table, whole or not at all; a folder that cannot be written is no error."""
    rows = [{"shape": list(shape), "gflops": found} for shape, found in table.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{time.time_ns()}.part")
        part.write_text(json.dumps({"rates": rows}, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        log.info("the measured rates of matrix products are not kept: %s", error)
