"""Builds the native kernels with AddressSanitizer and UBSan, and runs their tests on that build.

    python tests/kernels/sanitize.py [--fastest] [options of pytest]

With `--fastest` only the instruction level is built that this processor runs fastest. The build
lies in build/sanitize, beside the product's. Both sanitizers are tested first: each must report the
fault that is planted for it, in every build that this processor runs, and nothing in the same call
made right. Files of tests among the options are run instead of all the kernels'.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "sanitize"
FOLDER = BUILD / "lib" / "onward" / "kernels" / "native"

# Calls past the checks of signatures.py, without torch, whose OpenMP the compiler's stands for:
# `count` numbers of arrays of 8, and blocks of `block` numbers.
PROBE = """
import ctypes, sys
path, openmp, count, block = sys.argv[1:]
ctypes.CDLL(openmp, ctypes.RTLD_GLOBAL)
c = ctypes.CDLL(path)
x, y, partial = (ctypes.c_float * 64)(), (ctypes.c_float * 8)(), (ctypes.c_double * 64)()
n = ctypes.c_int64
c.onward_activation(x, y, n(int(count)), n(2), n(0))
c.onward_norm(x, y, partial, n(8), n(int(block)), n(0))
"""
USABLE = "from onward.kernels.native.library import usable"
# What is planted -> the arguments `count` and `block`, and the words of the report
FAULTS = {
    "a write behind an array": ("9", "8", "AddressSanitizer: heap-buffer-overflow"),
    "a division by zero": ("8", "0", "runtime error: division by zero"),
    "nothing": ("8", "8", ""),
}


def main() -> None:
    preloaded = [_runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    openmp = _runtime("libgomp.so")
    build = [sys.executable, "setup.py", "-q", "build_ext", "--sanitize",
             "--build-lib", str(BUILD / "lib"), "--build-temp", str(BUILD / "objects")]  # fmt: skip
    given = sys.argv[1:]
    if "--fastest" in given:
        given.remove("--fastest")
        shutil.rmtree(FOLDER, ignore_errors=True)  # no level of an earlier build
        found = _output(f"{USABLE}; print(usable()[0])", dict(os.environ))
        build.append(f"--levels={found.stdout.strip() or 'plain'}")
    if subprocess.run(build, cwd=ROOT).returncode:
        sys.exit("sanitize: the native kernels did not compile (above); fix: a C++ compiler, g++")
    watched = os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        # Python's and torch's own leaks are not ours
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # so that ctypes arrays have red zones as well
        "PYTHONPATH": str(ROOT / "src"),
        "ONWARD_NATIVE_FOLDER": str(FOLDER),
    }
    levels = _output(f"{USABLE}; print(*usable())", watched)
    if levels.returncode or not levels.stdout.strip():
        sys.exit(f"sanitize: Python does not run under the sanitizers:\n{levels.stderr}")
    for level in levels.stdout.split():
        for planted, (count, block, words) in FAULTS.items():
            (path,) = map(str, FOLDER.glob(f"{level}.*.so"))
            made = _output(PROBE, watched, path, openmp, count, block)
            failed = made.returncode != 0
            if failed != bool(words) or words not in made.stderr:
                sys.exit(f"sanitize: {planted} in {level}, and the report is:\n{made.stderr}")
    print(f"sanitize: planted faults are reported ({levels.stdout.strip()})", flush=True)
    tests = [] if any(Path(x.partition("::")[0]).exists() for x in given) else ["tests/kernels"]
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *given]
    sys.exit(subprocess.run(run, cwd=ROOT, env=watched).returncode)


def _runtime(name: str) -> str:
    """The path of a library that the compiler would link."""
    try:
        compiler = os.environ.get("CXX", "g++")
        found = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"sanitize: no C++ compiler ({error}); fix: install g++")
    if not Path(found).is_absolute():
        sys.exit(f"sanitize: {compiler} has no {name}; fix: install g++ with its sanitizers")
    return found


def _output(
    program: str, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


if __name__ == "__main__":
    main()
