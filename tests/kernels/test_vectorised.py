"""Every loop marked `#pragma omp simd` becomes vector instructions: the compiler says so."""

from __future__ import annotations

import ast
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/onward/kernels/native/src"
SIMD = "#pragma omp simd"


def flags() -> list[str]:
    """COMMON of setup.py, with which all builds are compiled."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMON":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no COMMON")


def extent(lines: list[str], start: int) -> range:
    """The lines, from 1, of the statement that begins at index `start`."""
    end, depth = start, 0
    while True:
        code = lines[end].partition("//")[0]
        depth += code.count("{") - code.count("}")
        if depth == 0 and code.rstrip().endswith((";", "}")):
            return range(start + 1, end + 2)
        end += 1


def marked(path: Path) -> list[set[int]]:
    """The lines of each loop under the pragma, with those of the lambdas that it calls."""
    lines = path.read_text().splitlines()
    lambdas = {
        found[1]: extent(lines, i)
        for i, line in enumerate(lines)
        if (found := re.match(r" *const auto (\w+) = \[", line))
    }
    loops: list[set[int]] = []
    for i, line in enumerate(lines):
        if line.strip().startswith(SIMD):
            loop = extent(lines, i + 1)
            text = "\n".join(lines[j - 1] for j in loop)
            called = [lambdas[name] for name in lambdas if f"{name}(" in text]
            loops.append(set(loop).union(*called))
    return loops


def vectorised(path: Path) -> set[int]:
    """The lines at which gcc reports a vectorised loop."""
    compiler = shutil.which("g++")
    if compiler is None or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("needs g++ on x86-64")
    report = subprocess.run(
        [
            compiler, *flags(), "-march=x86-64-v3", "-fPIC", "-fopt-info-vec-optimized", "-S", "-o",
            "/dev/null", str(path),
        ],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    name = re.escape(path.name)
    found = re.findall(rf"{name}:(\d+):\d+: optimized: .*loop vectorized", report)
    return {int(line) for line in found}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "path", sorted(p for p in SOURCES.glob("*.cpp") if marked(p)), ids=lambda p: p.name
)
def test_marked_loops_are_vectorised(path: Path) -> None:
    lines = vectorised(path)
    assert [loop for loop in marked(path) if not lines.intersection(loop)] == []


def test_the_generator_is_drawn_in_a_marked_loop() -> None:
    """random.h's hash is inlined there: a call left in the loop would keep it scalar."""
    (loop,) = marked(SOURCES / "dropout.cpp")
    lines = (SOURCES / "dropout.cpp").read_text().splitlines()
    assert any("key.word" in lines[i - 1] for i in loop)
