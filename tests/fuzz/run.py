"""Runs programs from seeds, eager beside Onward, and says which differ.

    python tests/fuzz/run.py --count 5000 --seed 0 --workers 2
    python tests/fuzz/run.py --only 17 --shrink

Each worker is a process of its own: what kills it is a finding too. Exit status 1 on findings.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "support")]


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--count", type=int, default=5000, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="the first; -1: from the clock")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop then, whatever was done")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="every other seed from the clock")
    parser.add_argument("--skip", nargs="+", default=[], help="leave out programs with these texts")
    parser.add_argument("--having", nargs="+", default=[], help="only those with one of these")
    parser.add_argument("--only", type=int, nargs="+", help="these seeds, in this process")
    parser.add_argument("--shrink", action="store_true", help="and make what fails small")
    parser.add_argument("--shrink-seconds", type=float, default=120.0)
    parser.add_argument("--case", type=Path, help="a case from a file, in this process")
    parser.add_argument(
        "--show", action="store_true", help="print the program of --only, run nothing"
    )
    parser.add_argument("--out", type=Path, help="a folder for findings, as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def prepare() -> None:
    """One thread, no network, the measurements of the machine apart from the user's; and what
    makes a third of the time: no memory of traced ops, of which small programs repeat few, and no
    garbage collection among the libraries' own objects."""
    os.environ.setdefault("ONWARD_CACHE", str(Path(tempfile.gettempdir()) / "onward-tests"))
    import collector
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    torch._dynamo.config.fake_tensor_cache_enabled = False
    collector.settle()
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def verdict_of(case: dict[str, Any]) -> dict[str, Any]:
    from fuzz.judge import judge

    start = time.process_time()
    found = judge(case)
    return {**vars(found), "finding": found.finding, "seconds": time.process_time() - start}


def verdict_of_seed(seed: int) -> dict[str, Any]:
    from fuzz.histories import case_of

    return {"seed": seed, **verdict_of(case_of(seed))}


def program(seed: int) -> str:
    """What a seed's case does, as text."""
    from fuzz.histories import case_of
    from fuzz.source import PRELUDE, definitions, history_source

    case = case_of(seed)
    return definitions(case).replace(PRELUDE, "") + history_source(case) + json.dumps(case)


def campaign(said: argparse.Namespace) -> list[dict[str, Any]]:
    """Judges the seeds with several workers; the verdicts."""
    from fuzz.workers import by_workers

    fresh = int(time.time()) * 100_000 % 2**31
    begin = fresh if said.seed < 0 else said.seed
    print(f"fuzz: seeds from {begin}" + (f", every other from {fresh}" if said.fresh else ""))
    seeds = [
        fresh + i // 2 if said.fresh and i % 2 else begin + (i // 2 if said.fresh else i)
        for i in range(said.count)
    ]

    def wanted(seed: int) -> bool:
        if said.skip and any(text in program(seed) for text in said.skip):
            return False
        return not said.having or any(text in program(seed) for text in said.having)

    command = (sys.executable, str(HERE / "run.py"), "--serve")
    return by_workers(seeds, command, said.workers, said.seconds, wanted)


def these(said: argparse.Namespace) -> int:
    """The cases asked for, in this process."""
    prepare()
    from fuzz.histories import case_of

    cases = [json.loads(said.case.read_text())] if said.case else map(case_of, said.only)
    return max([one(case, said) for case in cases])


def one(case: dict[str, Any], said: argparse.Namespace) -> int:
    """A case, shrunk if asked for, printed as a program."""
    from fuzz.histories import PASSES
    from fuzz.judge import judge
    from fuzz.shrink import shrink
    from fuzz.source import script

    if said.show:
        print(script(case, case["variants"][-1], f"seed {case['seed']}"))
        return 0
    found = judge(case)
    print(f"==== seed {case['seed']}: {found.kind}: {found.signature}")
    print(f"{found.detail}\nvariant {found.variant}", flush=True)
    if not found.finding:
        return 0
    if said.shrink:
        case = shrink(case, found, judge, said.shrink_seconds)
        found = judge(case)
        gone = []
        if found.variant.get("disable", ()) != ["row_demand"]:
            for name in ("row_demand", *PASSES):
                variant = {**found.variant, "disable": [*found.variant.get("disable", ()), name]}
                if not judge(case | {"variants": [variant]}).finding:
                    gone.append(name)
        if not judge(case | {"variants": [{**found.variant, "native": "0"}]}).finding:
            gone.append("native")
        title = f"seed {case['seed']}: {found.kind}: {found.detail}\nvariant {found.variant}"
        print(script(case, found.variant, f"{title}\ngone without: {', '.join(gone) or 'nothing'}"))
        if said.out:
            said.out.mkdir(parents=True, exist_ok=True)
            (said.out / f"{case['seed']}.json").write_text(json.dumps(case, indent=1))
    return 1


def main() -> int:
    said = options()
    from fuzz.workers import report, serve

    if said.serve:
        prepare()
        serve(verdict_of_seed)
        return 0
    if said.only is not None or said.case:
        return these(said)
    for number in (signal.SIGINT, signal.SIGTERM):  # in the background both may be ignored
        signal.signal(number, signal.default_int_handler)
    found = campaign(said)
    report(found, "program")
    bad = [v for v in found if v["finding"]]
    if said.out:
        said.out.mkdir(parents=True, exist_ok=True)
        (said.out / "findings.json").write_text(json.dumps(bad, indent=1))
    for v in bad[:1]:
        print(f"reproduce: python tests/fuzz/run.py --only {v['seed']} --shrink")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
