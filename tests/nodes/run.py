"""onnx's backend node tests against the importer, the executor and the gradient rules.

`python tests/nodes/run.py [--write] [--jobs N] [--only PATTERN]` prints what became of each and the
counts; `--write` keeps it as the table that the suite is held against, and writes
docs/operators.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from nodes.autograd import call_by_torch
from nodes.cases import cases, op_of
from nodes.engine import EQUAL
from nodes.more_cases import every as every_call
from nodes.outcome import judged
from nodes.page import PAGE, page
from nodes.table import Row, table, write


def outcomes(names: list[str]) -> dict[str, Row]:
    torch.set_num_threads(1)
    found = cases()
    return {name: (op_of(name), *judged(found[name])) for name in names}


def calls(part: range) -> list[str]:
    """The calls of `more_cases.py` with those numbers that are not as torch's; how."""
    torch.set_num_threads(1)
    found = every_call()
    made = ((found[i], call_by_torch(found[i])) for i in part)
    return [f"{call} | {why}" for call, why in made if why != EQUAL]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a pattern of names")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="keep the table, write the page")
    args = parser.parse_args()
    every = sorted(cases())
    names = [name for name in every if re.search(args.only, name)]
    made: dict[str, Row] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for part in pool.map(outcomes, [names[i :: args.jobs] for i in range(args.jobs)]):
            made |= part
    held = table()
    for name in names:
        if args.only or held.get(name) != made[name]:
            print(name, *made[name], sep=" | ")
    for i, what in ((1, "results"), (2, "gradients"), (3, "beside torch")):
        counts = Counter(row[i] for row in made.values())
        print(f"{what}: " + ", ".join(f"{n} {why[:60]}" for why, n in counts.most_common(12)))
    with ProcessPoolExecutor(args.jobs) as pool:
        count = len(every_call())
        parts = pool.map(calls, [range(i, count, args.jobs) for i in range(args.jobs)])
        different = [why for part in parts for why in part]
    print(*different, f"calls beside torch: {count}, of which {len(different)} differ", sep="\n")
    if args.write:
        write(
            {name: made.get(name) or held[name] for name in every if name in made or name in held}
        )
        PAGE.write_text(page())


if __name__ == "__main__":
    main()
