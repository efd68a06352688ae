"""Kernels that the calls of `triton_sizes.py` launch, compiled for devices that are not here.

    python tests/support/triton_compiled.py --write              # the table anew: half an hour
    python tests/support/triton_compiled.py --write AdamUpdate   # the rows of calls with this name

Without `--write` it answers `CALL|DTYPE|TARGET`, a line each, with the figures of each kernel that
the call launches, as JSON. Triton's own launcher is replaced: it would ask for a device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton  # pyright: ignore[reportMissingImports]
from answers import serve
from triton import knobs  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource, make_backend  # pyright: ignore[reportMissingImports]
from triton.runtime.jit import (  # pyright: ignore[reportMissingImports]
    JITFunction,
    create_function_from_signature,
)
from triton_budgets import TABLE, TARGETS, Budgets, Figures, Table
from triton_sizes import CALLS, RealCall

from onward.kernels.triton import attention

_TARGETS = {
    name: GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else
    GPUTarget("hip", name, 64)
    for name in TARGETS
}  # fmt: skip
# Unless a launch says otherwise, a product and a sum are one instruction: Triton's default.
_STATED = {"enable_fp_fusion": True, "debug": False, "instrumentation_mode": ""}
_BY_NAME = {str(call): call for call in CALLS}
_launches: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []


def _recorded(function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    _launches.append((function, args, options))


_jitted: Any = JITFunction
_jitted.run = _recorded


def _capability(target: str) -> str | tuple[int, int]:
    """What Onward calls a target."""
    arch = _TARGETS[target].arch
    return (arch // 10, arch % 10) if isinstance(arch, int) else target


def measured(call: RealCall, dtype: str, target: str) -> dict[str, Figures]:
    """The figures of each kernel that a call launches on a target."""
    _launches.clear()
    with patch.object(attention, "capability_of", lambda _: _capability(target)):
        call.launch(dtype)
    assert _launches, f"{call} launches nothing"
    found: dict[str, Figures] = {}
    seen: set[str] = set()
    for function, args, options in _launches:
        source, settings = _source(function, args, {**_STATED, **options}, target)
        if (key := f"{source.hash()} {settings}") in seen:
            continue
        seen.add(key)
        kernel = triton.compile(source, target=_TARGETS[target], options=settings)
        figures = _of_amd(kernel) if "amdgcn" in kernel.asm else _of_nvidia(kernel)
        module = function.__module__.rpartition(".")[2].removesuffix("_device")
        name = f"{module}.{function.__name__}"
        found[name] = figures.or_worse(found[name]) if name in found else figures
    return found


def _source(
    function: JITFunction, args: tuple[Any, ...], options: dict[str, Any], target: str
) -> tuple[Any, dict[str, Any]]:
    """What `JITFunction.run` would compile, with all that it specialises on."""
    backend = make_backend(_TARGETS[target])
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, settings = bind(*args, **options)
    parsed, signature, constants, attrs = function._pack_args(
        backend, options, bound, specialization, settings
    )
    return ASTSource(function, signature, constants, attrs), parsed.__dict__


def _of_nvidia(kernel: Any) -> Figures:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
        code = _output(knobs.nvidia.nvdisasm.path, "-c", file.name)
    held = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    spills = re.search(r"\b(STL|LDL)\b", code) is not None  # a frame may lie unused
    return Figures(
        held["REG"], held["STACK"] + held["LOCAL"] if spills else 0, kernel.metadata.shared,
        _widest(r"\b(?:LDG|LDGSTS)\b([.\w]*)", code), _widest(r"\bSTG\b([.\w]*)", code),
    )  # fmt: skip


def _widest(access: str, code: str) -> int:
    """The most bits of these instructions: a suffix of 64, 128 or 256, U16 or U8, or 32 without."""
    widths = [0]
    for suffix in re.findall(access, code):
        parts = suffix.split(".")
        widest = max((int(p) for p in parts if p in ("64", "128", "256")), default=32)
        narrow = {"U16": 16, "S16": 16, "U8": 8, "S8": 8}
        widths.append(min([widest, *(narrow[p] for p in parts if p in narrow)]))
    return max(widths)


def _of_amd(kernel: Any) -> Figures:
    code = kernel.asm["amdgcn"]
    held = {n: int(x) for n, x in re.findall(r"\.([sv]gpr_(?:spill_)?count):\s*(\d+)", code)}
    bits = {"byte": 8, "short": 16, "dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
    access = r"\b(?:global|buffer|flat)_{}_(?:[us])?(byte|short|dwordx?\d?)"

    def widest(way: str) -> int:
        return max((bits[x] for x in re.findall(access.format(way), code)), default=0)

    return Figures(
        held["vgpr_count"], 4 * held["vgpr_spill_count"], kernel.metadata.shared, widest("load"),
        widest("store"), held["sgpr_count"],
    )  # fmt: skip


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def answer(question: str) -> dict[str, list[int]]:
    name, dtype, target = question.split("|")
    return {k: [*astuple(f)] for k, f in measured(_BY_NAME[name], dtype, target).items()}


def write(only: str) -> None:
    """Writes the table anew, or the rows of the calls with this text in their names; rows of calls
    that are no more go."""
    cases = {f"{call} {dtype}": (call, dtype) for call in CALLS for dtype in call.dtypes}
    held: Budgets = Table.read().budgets if only else {}
    budgets: Budgets = {
        kernel: kept
        for kernel, rows in held.items()
        if (kept := {row: x for row, x in rows.items() if row in cases and only not in row})
    }
    for row, (call, dtype) in cases.items():
        if only in row:
            print(row, flush=True)
            for target in TARGETS:
                for kernel, figures in measured(call, dtype, target).items():
                    budgets.setdefault(kernel, {}).setdefault(row, {})[target] = figures
    TABLE.write_text(Table(triton.__version__, budgets).text(), encoding="utf-8")


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder))
        if arguments[:1] == ["--write"]:
            write(" ".join(arguments[1:]))
        else:
            serve(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
