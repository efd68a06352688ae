"""The largest batch that trains within a memory limit: Onward beside eager PyTorch.

    python benchmarks/largest_batch.py --engine onward --model tutorial

Rule: a batch of n sequences fits if a fresh process that imports what its engine needs, builds the
model and AdamW, and takes three training steps never has more than the limit (2e9 bytes) resident:
the kernel's VmHWM, so that imports, compilation and the first step count. Searched by doubling (or
halving) from the case's own batch, then by bisection until the gap is one sequence or 2 %. When
time runs out the answer is the largest batch seen to fit, marked as not complete.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import ENGINES, Memory, Session, say

if TYPE_CHECKING:
    from workloads import Case

LIMIT = 2_000_000_000  # bytes
_STEPS = 3  # AdamW's moments exist after the first


def peak(case: Case, engine: str, threads: int, limit: int) -> int:
    """VmHWM of this process, in bytes, after the steps, or after the one that passed the limit."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    memory = Memory("cpu")
    session = Session(ENGINES[engine], case, "cpu", _STEPS)
    session.attach()
    for batch in session.batches:
        float(session.step(batch))
        if memory.peak() > limit:
            break
    return memory.peak()


def search(case: Case, engine: str, threads: int, seconds: float, limit: int = LIMIT) -> Any:
    """`batch` (0: not even one sequence fits), `complete`, and each trial's peak in bytes."""
    end = time.monotonic() + seconds
    peaks: dict[int, int | None] = {}  # None: the trial failed

    def fits(batch: int) -> bool:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peaks[batch] = _trial(replace(case, batch=batch), engine, threads, limit, left)
        found = peaks[batch]
        said = "failed" if found is None else f"{found / 1e9:.2f} GB"
        say(f"{case.name}: {engine}: batch {batch}: {said}")
        return found is not None and found <= limit

    try:
        _bisect(fits, case.batch)
        complete = True
    except TimeoutError:
        complete = False
    good = [n for n, found in peaks.items() if found is not None and found <= limit]
    return {
        "limit_bytes": limit, "batch": max(good, default=0), "complete": complete,
        "peaks": dict(sorted(peaks.items())),
    }  # fmt: skip


def _bisect(fits: Callable[[int], bool], start: int) -> None:
    low, high = 0, start  # low fits, high does not
    while fits(high):
        low, high = high, 2 * high
    while not low and high > 1:  # the case's own batch is too large
        if fits(high // 2):
            low = high // 2
        else:
            high //= 2
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle


def _trial(case: Case, engine: str, threads: int, limit: int, seconds: float) -> int | None:
    request = {"case": asdict(case), "engine": engine, "threads": threads, "limit": limit}
    try:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--answer"],
            input=json.dumps(request), capture_output=True, text=True, timeout=seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    if done.returncode:  # out of memory, or an error: say which
        say(f"  exit {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
        return None
    return int(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """One search, by hand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="gpt2_small", help="default: %(default)s")
    parser.add_argument("--engine", default="onward", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; default: torch's")
    parser.add_argument("--seconds", type=float, default=300.0, help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=LIMIT, help="bytes; default: %(default)s")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        from workloads import Case

        request = json.load(sys.stdin)
        case = Case(**request["case"])
        print(peak(case, request["engine"], request["threads"], request["limit"]))
        return 0
    from cpu import FULL

    case = next((case for case in FULL if case.model == options.model), None)
    if case is None:
        parser.error(f"no such case; there are {', '.join(case.model for case in FULL)}")
    found = search(case, options.engine, options.threads, options.seconds, int(options.limit))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
