"""Plants each fault of `faults.py` in a copy of the sources, and asks the tests that concern it.

    python tests/mutation/run.py [-k text] [--start 100] [--jobs 2]

Prints `found` or `NOT FOUND` for each; exits with 1 where one was not found.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
# a plugin's module came with the imports below: its own asserts need no rewriting
PRELOADED = "ignore::pytest.PytestAssertRewriteWarning"
PASSED = 0  # pytest's exit code
FORK = multiprocessing.get_context("fork")
SLOW = ("torch", "transformers", "onnxruntime")  # to import: once, before forking
LIMIT = 900  # seconds: a fault may make a test run for ever, which finds it too


def mutated(fault: Fault, root: Path = ROOT) -> str:
    """The file with the fault. Raises ValueError where its text is not there exactly once."""
    text = (root / "src/onward" / fault.file).read_text()
    count = text.count(fault.old)
    if count != 1:
        raise ValueError(
            f"{fault.name}: the text occurs {count} times in {fault.file}; fix: write the fault "
            "for the file as it is"
        )
    return text.replace(fault.old, fault.new)


def outcome(fault: Fault, only: str = "") -> str:
    """`found` with the test that failed, or `NOT FOUND`."""
    with tempfile.TemporaryDirectory(prefix="onward-mutation-") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        for part in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / part, copy / part)
        (copy / "src/onward" / fault.file).write_text(mutated(fault))
        tests = [only] if only else [f"tests/{t}" for t in fault.tests]
        log = copy / "log.txt"
        for more in ([], ["--whole"]):  # the cases of `make test` first: they mostly find it
            child = FORK.Process(target=_ask, args=(copy, [*more, *tests], log))
            child.start()
            child.join(LIMIT)
            if child.is_alive():
                child.kill()
                return f"found: no end within {LIMIT} s"
            if child.exitcode != PASSED:
                break
        said = log.read_text()
    if child.exitcode == PASSED:
        return "NOT FOUND"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if failed is None:
        return f"NOT RUN: pytest says {child.exitcode}: {said[-300:]}"
    return f"found: {failed.group(1)}{' (of all cases)' if more else ''}"


def _ask(copy: Path, asked: list[str], log: Path) -> None:
    """In a process of its own: the tests, until one fails."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy / "src")
    sys.path.insert(0, str(copy / "src"))
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        options = [
            "-x",
            "-q",
            "-W",
            PRELOADED,
            "-p",
            "no:cacheprovider",
            "-n",
            "0",
            "--show-capture=no",
        ]
        code = pytest.main([*options, *asked])
    os._exit(int(code))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", dest="text", default="", help="faults whose name has this pattern")
    parser.add_argument("--start", type=int, default=1, help="number of the first of them, from 1")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tests", default="", help="ask these tests instead, such as tests/plan")
    given = parser.parse_args()
    chosen = [f for f in FAULTS if re.search(given.text, f.name)][given.start - 1 :]
    for fault in chosen:
        mutated(fault)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in SLOW:
        importlib.import_module(name)

    def run(fault: Fault) -> bool:
        start = time.perf_counter()
        said = outcome(fault, given.tests)
        print(f"{fault.name}: {said} ({time.perf_counter() - start:.0f} s)", flush=True)
        return said.startswith("found")

    with ThreadPoolExecutor(given.jobs) as pool:
        found = list(pool.map(run, chosen))
    print(f"{sum(found)} of {len(found)} faults found")
    return 0 if all(found) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
