"""Chooses an engine for a shape by measurements, made once per machine and stored as data.

A few sample products, one for each class of shape in training, are timed on every engine (half a
second). A product's rate on an engine is estimated from the samples whose operands are stored
alike, nearer ones weighted more. The engine that is best over all samples is taken unless another
is estimated to be at least 3 % faster, since smaller differences are noise. The table is a JSON
file in the user's cache folder; its name includes processor, thread count and versions, so that a
change of any of them leads to new measurements.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from onward.environment import environment
from onward.errors import OnwardError
from onward.kernels.blas.engines import engines, plain_product

log = logging.getLogger("onward")
TORCH = "torch"  # torch.mm with its own threads
# passes over all samples, and runs of a sample in each: a short disturbance hits only one pass
_PASSES, _REPEATS = 3, 2
_MARGIN = 1.03


class Shape(NamedTuple):
    """The shape of a product `f32[m,n] = f32[m,k] f32[k,n]`. ta, tb: whether the first and the
    second operand are stored transposed."""

    m: int
    n: int
    k: int
    ta: bool = False
    tb: bool = False

    @property
    def flops(self) -> int:
        """FLOPs of the product, two for each multiplication with its addition."""
        return 2 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}{' ta' if self.ta else ''}{' tb' if self.tb else ''}"


Rates = dict[Shape, dict[str, float]]  # GFLOP/s by sample and engine

# One per class: a layer's products, wide ones, a vocabulary's (of odd sizes, as vocabularies have),
# and small ones; for the forward, the input's gradient and the weight's.
SAMPLES = (
    *(
        Shape(m, n, k, ta, tb)
        for m, n, k in (
            (64, 64, 64), (256, 128, 128), (700, 200, 200), (512, 512, 512), (512, 1024, 256),
            (512, 256, 1024),
        )
        for ta, tb in ((False, True), (False, False), (True, False))
    ),
    Shape(256, 8193, 256, False, True),
    Shape(256, 256, 8193, False, False),
    Shape(8193, 256, 256, True, False),
)  # fmt: skip


def choose(shape: Shape) -> str:
    """The engine for a shape, by name: one of `engines()`, or "torch"."""
    return forced() or _fastest((shape,), torch.get_num_threads(), (TORCH, *engines()))


def choose_called(*shapes: Shape) -> str:
    """A single engine for all of these shapes, among those that a kernel can call from its own
    threads."""
    name = forced()
    if name in engines():
        return name
    return _fastest(shapes, torch.get_num_threads(), tuple(engines()))


def forced() -> str:
    """The engine that ONWARD_BLAS names; "" where it is not set. Raises OnwardError where it is not
    available."""
    name = environment().blas
    if name and name != TORCH and name not in engines():
        have = ", ".join([TORCH, *engines()])
        raise OnwardError(f"ONWARD_BLAS={name} is not available; fix: one of {have}")
    return name


@functools.lru_cache(maxsize=4096)
def _fastest(shapes: tuple[Shape, ...], threads: int, names: tuple[str, ...]) -> str:
    table = rates(threads)
    return fastest(table, shapes, names) if table else TORCH


def fastest(table: Rates, shapes: Sequence[Shape], names: Sequence[str]) -> str:
    """The engine of `names` with the least estimated time for all shapes together."""
    seconds = {name: sum(s.flops / _expected(table, s, name) for s in shapes) for name in names}
    favourite = max(names, key=lambda name: sum(math.log(found[name]) for found in table.values()))
    best = min(names, key=lambda name: seconds[name])
    return best if seconds[best] * _MARGIN < seconds[favourite] else favourite


def _expected(table: Rates, shape: Shape, name: str) -> float:
    """The estimated GFLOP/s: the mean over samples stored alike, weighted by exp(-distance^2) in
    log m, n, k."""
    alike = [s for s in table if (s.ta, s.tb) == (shape.ta, shape.tb)] or list(table)
    distances = [
        sum(math.log(a / max(b, 1)) ** 2 for a, b in zip(s[:3], shape[:3], strict=True))
        for s in alike
    ]
    nearest = min(distances)  # subtracted, so that the weights for a distant shape do not vanish
    weights = [math.exp(nearest - d) for d in distances]
    logs = [math.log(table[s][name]) for s in alike]
    weighed = sum(w * x for w, x in zip(weights, logs, strict=True))
    return math.exp(weighed / sum(weights))


@functools.cache
def rates(threads: int) -> Rates:
    """GFLOP/s by sample and engine, from the file or measured now; empty without engines."""
    if not engines():
        return {}
    path = _file(threads)
    table = _read(path)
    if table is None:
        table = measure()
        _write(path, table)
    return table


def known_rates(threads: int) -> Rates | None:
    """The stored rates of this machine; None where there are none."""
    return _read(_file(threads)) if engines() else None


def measure_now(threads: int) -> Rates:
    """Measures all engines again and stores the rates."""
    table = measure()
    _write(_file(threads), table)
    rates.cache_clear()
    return table


def measure() -> Rates:
    """Times every sample on every engine in turn; takes the best of a few runs."""
    best: dict[Shape, dict[str, float]] = {shape: {} for shape in SAMPLES}
    for _ in range(_PASSES):
        for shape in SAMPLES:
            calls = _calls(shape)
            for _ in range(_REPEATS):
                for name, call in calls.items():
                    start = time.perf_counter()
                    call()
                    seconds = time.perf_counter() - start
                    best[shape][name] = min(best[shape].get(name, math.inf), seconds)
    return {
        # on a busy machine a rate may round to 0, which is no rate
        shape: {name: max(0.1, round(shape.flops / s / 1e9, 1)) for name, s in found.items()}
        for shape, found in best.items()
    }


def _calls(shape: Shape) -> dict[str, Callable[[], Any]]:
    m, n, k, ta, tb = shape
    left = torch.full((k, m) if ta else (m, k), 0.5)
    right = torch.full((n, k) if tb else (k, n), 0.5)
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
        _processor(), f"{threads}threads", f"torch{torch.__version__}", f"numpy{np.__version__}"
    )  # fmt: skip
    name = "-".join("".join(c if c.isalnum() or c in ".+" else "_" for c in p) for p in parts)
    return environment().cache / "products" / f"{name}.json"


def _processor() -> str:
    """The processor's model and instruction level, since virtual machines of one name may
    differ."""
    return f"{processor_name()} {torch.backends.cpu.get_cpu_capability()}"


def processor_name() -> str:
    """The processor's model, as the system reports it."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return model


def _read(path: Path) -> Rates | None:
    """Reads the stored table; None where it is absent, damaged, or of other engines or samples."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rates"]
        table = {Shape(*row["shape"]): dict(row["gflops"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    names = {TORCH, *engines()}
    complete = set(table) == set(SAMPLES) and all(set(rate) == names for rate in table.values())
    return table if complete else None


def _write(path: Path, table: Rates) -> None:
    """Stores the table, whole or not at all. A folder that cannot be written is logged, not
    raised."""
    rows = [{"shape": list(shape), "gflops": found} for shape, found in table.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{time.time_ns()}.part")
        part.write_text(json.dumps({"rates": rows}, indent=1), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        log.info("the measured rates of matrix products are not kept: %s", error)
