"""A native kernel is two files: its C++ source and its Python binding, found by themselves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onward.kernels import ATEN
from onward.kernels.native import joined

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
#include "annotations.h"

// y = x / 2
extern "C" void onward_halve(const float* OF(n) x, float* OF(n) y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] / 2.0f;
}
"""
BINDING = """
from onward.kernels.kernel import Kernel
from onward.kernels.native.library import library, only_f32, where


def _bind(args):
    return library().launch("onward_halve", x=args.x(), y=args.y, n=args.x().numel())


KERNELS = {"Halve": Kernel("native.halve", _bind, unsupported=only_f32, where=where)}
"""
# Prints what a right call writes, and how wrong ones are refused.
PROGRAM = """
import json, torch
from onward.graph.types import parse_type
from onward.kernels import KernelArguments, KernelSpec, host, kernel_for

f = parse_type("f32[6]")
kernel = kernel_for(KernelSpec("Halve", {}, (f,), (f,)), host())
x, y = torch.arange(6.0), torch.full((6,), -1.0)
kernel.bind(KernelArguments({}, [x], [y], []))()
said = {"kernel": kernel.name, "y": y.tolist()}
for name, wrong in {"dtype": y.double(), "count": y[:5]}.items():
    try:
        kernel.bind(KernelArguments({}, [x], [wrong], []))
    except (TypeError, ValueError) as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""
# Compiles quickly, and only for the plain level: others are refused, as by an old compiler.
COMPILER = """#!/bin/sh
case " $* " in *" -march="*) exit 1 ;; esac
exec {compiler} "$@" -O0
"""


def test_a_kernel_is_added_by_two_files(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    real = shutil.which(os.environ.get("CXX", "g++"))
    if real is None or not (ROOT / "setup.py").exists():
        pytest.skip("no C++ compiler on this machine, or nothing to build with")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    package = tmp_path / "src" / "onward"
    shutil.copytree(ROOT / "src" / "onward", package, ignore=shutil.ignore_patterns("*.so"))
    native = package / "kernels" / "native"
    (native / "src" / "halve.cpp").write_text(SOURCE)
    (native / "halve.py").write_text(BINDING)
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER.format(compiler=real))
    compiler.chmod(0o755)
    watched = {k: v for k, v in os.environ.items() if not k.startswith("ONWARD_")}
    tools = {"CC": str(compiler), "CXX": str(compiler), "PYTHONPATH": str(tmp_path / "src")}
    made = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tmp_path, env=watched | tools, capture_output=True, text=True,
    )  # fmt: skip
    assert [path.name.partition(".")[0] for path in native.glob("*.so")] == ["plain"], made.stderr
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path, env=watched | tools, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "kernel": "native.halve",
        "y": [0.0, 0.5, 1.0, 1.5, 2.0, 2.5],
        "dtype": "TypeError: onward_halve: y is a torch.float64 tensor on cpu, not a "
        "torch.float32 tensor on cpu",
        "count": "ValueError: onward_halve: y has 5 numbers in a row, and 6 are written",
    }


def test_kernels_of_one_op_stand_in_one_file() -> None:
    """Otherwise the files' names would say which is tried first."""
    first, second = (kernels[0] for kernels in (ATEN["Add"], ATEN["Mul"]))
    assert joined([("a.py", {"Add": (first, second)}), ("b.py", {"Mul": second})]) == {
        "Add": (first, second),
        "Mul": (second,),
    }
    with pytest.raises(ValueError, match=r"a\.py and b\.py both have a native kernel of Add; fix"):
        joined([("a.py", {"Add": first}), ("b.py", {"Add": second})])
