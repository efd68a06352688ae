"""`onward doctor`: versions, and the kernels and libraries of this machine."""

from __future__ import annotations

import math
import platform
import shutil
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING

import onward
from onward.environment import environment, switch_off_telemetry, variables
from onward.memory_amounts import mib

if TYPE_CHECKING:
    import torch

# Packages by the extra that installs them.
EXTRAS = {
    "required": (
        "torch",
        "onnx",
        "onnx-ir",
        "numpy",
        "safetensors",
        "tqdm",
        "psutil",
        "jsonargparse",
        "pyyaml",
    ),
    "hf": ("transformers", "tokenizers", "accelerate"),
    "ort": ("onnxruntime",),
    "viz": ("matplotlib",),
}
SIDE = 384  # size of the matrices whose product is timed: a hundredth of a second, or much less
COMPILERS = ("c++", "g++", "clang++")


def facts(measure: bool = False, gpu: bool = False) -> Iterator[str]:
    """All facts, line by line. measure: times the matrix products of each engine again. gpu: also
    times GPUs and trains on them."""
    yield f"onward {onward.__version__}, Python {platform.python_version()}, {platform.platform()}"
    for extra, packages in EXTRAS.items():
        for package in packages:
            found = installed(package)
            if found is None:
                wanted = "onward" if extra == "required" else f"onward[{extra}]"
                found = f'not installed; fix: pip install "{wanted}"'
            yield f"  {extra:<9} {package:<14} {found}"
    if installed("torch") is None:
        return
    for part in (_machine(), _low_products(), _products(measure), _gpus(gpu), _environment()):
        for name, text in part:
            yield f"{name:<14}{text}"


def installed(package: str) -> str | None:
    """The version of an installed package; None where it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> Iterator[tuple[str, str]]:
    import torch

    from onward.kernels.blas.choice import processor_name
    from onward.kernels.native import library
    from onward.kernels.quota import processors, quota

    cores = len(processors())
    yield "processor", f"{processor_name()} ({platform.machine()}), {cores} cores to run on"
    yield "instructions", f"{torch.backends.cpu.get_cpu_capability()}, as PyTorch sees them"
    built = ", ".join(library.built()) or "nothing"
    yield "native build", f"{library.about()}; installed: {built}"
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    yield (
        "compiler",
        compiler
        or ("none found; native kernels are compiled at installation, with a C++ compiler"),
    )
    limit, allowed = variables().get("OMP_NUM_THREADS"), quota()
    yield (
        "threads",
        (
            f"{torch.get_num_threads()} in PyTorch; OMP_NUM_THREADS "
            + (f"is {limit}" if limit else "is not set")
            + ("" if allowed is None else f"; the container's quota is {allowed:.3g} processors")
        ),
    )
    yield "OpenMP", ", ".join(library.openmp_runtimes()) or "none loaded"
    if installed("onnxruntime") is not None:
        switch_off_telemetry()
        import onnxruntime

        providers = ", ".join(onnxruntime.get_available_providers())
        yield "onnxruntime", f"{onnxruntime.__version__} ({providers})"


def _low_products() -> Iterator[tuple[str, str]]:
    """Whether the processor has bf16 products, their speed, and what "auto" means here."""
    import torch

    from onward.graph.types import DType
    from onward.kernels.blas.low_product import widens
    from onward.kernels.host import bf16_instructions, host

    found = ", ".join(bf16_instructions()) or "no instructions for it"
    widened = "; Onward widens blocks to fp32" if widens(DType.BFLOAT16, host()) is None else ""
    low, wide = (_rate(dtype) for dtype in (torch.bfloat16, torch.float32))
    auto = "bf16" if host().multiplies_bf16 else "fp32"
    yield (
        "bf16",
        f"{found}; PyTorch's products of {SIDE}: {low:.0f} GFLOP/s, fp32 {wide:.0f}{widened}; "
        f'mixed_precision="auto" is {auto}',
    )


def _rate(dtype: torch.dtype) -> float:
    """GFLOP/s of PyTorch's product of two square matrices: the best of a few runs, within about a
    fifth of a second."""
    import torch

    a, b = torch.ones(SIDE, SIDE, dtype=dtype), torch.ones(SIDE, SIDE, dtype=dtype)
    torch.mm(a[:8], b)  # the first call sets up libraries
    best, start = math.inf, time.perf_counter()
    for _ in range(5):
        began = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() - start > 0.2:
            break
    return 2 * SIDE**3 / best / 1e9


def _products(measure: bool) -> Iterator[tuple[str, str]]:
    """The engines of matrix products, and their rates on this machine."""
    import torch

    from onward.kernels.blas import choice, engines

    found = engines.engines()
    paths = [f"{name} (in {Path(engine.path).name})" for name, engine in found.items()]
    yield "BLAS engines", ", ".join([choice.TORCH, *paths])
    if not found:
        yield "rates", "nothing to choose from"
        return
    threads = torch.get_num_threads()
    table = choice.measure_now(threads) if measure else choice.known_rates(threads)
    if table is None:
        yield "rates", "not measured yet; `onward doctor --measure` does it, or the first step"
        return
    for name in (choice.TORCH, *found):
        rates = [row[name] for row in table.values()]
        mean = math.exp(sum(map(math.log, rates)) / len(rates))
        first = sum(max(row, key=lambda n: row[n]) == name for row in table.values())
        yield (
            f"  {name}",
            f"{mean:.0f} GFLOP/s in the mean of {len(rates)} products, {max(rates):.0f} at most; "
            f"fastest on {first}",
        )


def _gpus(asked: bool) -> Iterator[tuple[str, str]]:
    """The facts about GPUs, where they are asked for."""
    if asked:
        from onward.recipes.doctor_gpu import gpu_facts

        yield "Triton", installed("triton") or "not installed; fix: pip install 'onward[gpu]'"
        yield from gpu_facts()


def _environment() -> Iterator[tuple[str, str]]:
    from onward.extend import GROUP

    plugins = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    yield "plugins", ", ".join(map(_plugin, plugins)) or "none installed"
    yield "cache", str(environment().cache)
    yield "graph cache", _graphs()
    set_here = [f"{n}={v}" for n, v in variables().items() if n.startswith("ONWARD_")]
    yield "environment", ", ".join(set_here) or "no ONWARD_ variable is set"


def _graphs() -> str:
    if not environment().graph_cache:
        return "off (ONWARD_GRAPH_CACHE=0)"
    from onward import cache_files

    files, nbytes = cache_files.size()
    return f"{files} files of graphs and tokens, {mib(nbytes)}; `onward cache --clear` removes them"


def _plugin(entry: EntryPoint) -> str:
    """Describes an installed plugin, without loading it."""
    package = "" if entry.dist is None else f", {entry.dist.name} {entry.dist.version}"
    return f"{entry.name} ({entry.value}{package})"
