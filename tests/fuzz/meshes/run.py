"""Trains windows on meshes from seeds, by ranks in lockstep and by one rank; says what differs.

    python tests/fuzz/meshes/run.py --count 500 --workers 2
    python tests/fuzz/meshes/run.py --only 17

Each worker is a process of its own: what kills it is a finding too. Exit status 1 on findings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "support")]


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--count", type=int, default=500, help="cases")
    parser.add_argument("--seed", type=int, default=0, help="the first; -1: from the clock")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop then, whatever was done")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="+", help="these seeds, in this process")
    parser.add_argument("--having", nargs="+", default=[], help="only cases with these texts")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def prepare() -> None:
    """Prepares the process as for other programs, and keeps no graphs on disk."""
    os.environ["ONWARD_GRAPH_CACHE"] = "0"
    from fuzz.run import prepare as one_thread

    one_thread()


def verdict_of(seed: int) -> dict[str, Any]:
    from fuzz.meshes.draw import case_of
    from fuzz.meshes.judge import judge

    start, case = time.process_time(), case_of(seed)
    found = judge(case)
    mesh = ",".join(f"{axis}={size}" for axis, size in case["sizes"].items())
    said = {"seed": seed, "mesh": mesh, "zero": case["zero"], **vars(found)}
    return said | {"finding": found.finding, "seconds": time.process_time() - start}


def campaign(said: argparse.Namespace) -> list[dict[str, Any]]:
    """Judges the seeds with several workers; the verdicts."""
    from fuzz.meshes.draw import case_of
    from fuzz.workers import by_workers

    begin = int(time.time()) * 1000 % 2**31 if said.seed < 0 else said.seed
    print(f"fuzz-mesh: seeds from {begin}")

    def wanted(seed: int) -> bool:
        case = json.dumps(case_of(seed)) if said.having else ""
        return all(text in case for text in said.having)

    command = (sys.executable, str(HERE / "run.py"), "--serve")
    seeds = range(begin, begin + said.count)
    return by_workers(seeds, command, said.workers, said.seconds, wanted)


def report_axes(found: list[dict[str, Any]]) -> None:
    """Prints how many judged cases had each axis."""
    judged = [v for v in found if v["kind"] not in ("refused", "invalid")]
    axes = Counter(axis.partition("=")[0] for v in judged for axis in v.get("mesh", "").split(","))
    print("judged: " + ", ".join(f"{n} {axis}" for axis, n in axes.most_common()))


def main() -> int:
    said = options()
    from fuzz.workers import report, serve

    if said.serve:
        prepare()
        serve(verdict_of)
        return 0
    if said.only is not None:
        prepare()
        found = [verdict_of(seed) for seed in said.only]
        for v in found:
            print(json.dumps(v, indent=1).replace("\\n", "\n"))
        return max(int(v["finding"]) for v in found)
    found = campaign(said)
    report(found, "case")
    report_axes(found)
    bad = [v for v in found if v["finding"]]
    for v in bad[:1]:
        print(f"reproduce: python tests/fuzz/meshes/run.py --only {v['seed']}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
