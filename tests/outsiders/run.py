"""Runs what others have written to test training, over Onward, and compares with what they ship.

    python tests/outsiders/run.py [--transformers-tests PATH] [--scripts PATH] [--only TEXT]

Without a path it runs what the installed packages hold: torch's tables of operators and of
optimizers, and scripts of our own in the usual shapes. With the paths of a checkout of
transformers it runs the tests of its Trainer and its example scripts too. None of it is kept here.
`differences.json` says what differs and why: a new difference, or one that is gone, exits with 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import table  # noqa: E402  # found by the path above


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transformers-tests", type=Path, help="a checkout, or its tests/trainer")
    parser.add_argument("--scripts", type=Path, help="a checkout, or its examples/pytorch")
    parser.add_argument("--only", default="", help="what has this in its name")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="these alone"
    )
    parser.add_argument("--side", choices=("drop-in", "accelerated"), help="this side alone")
    given = parser.parse_args()
    wrong: list[str] = []
    written = table.read()
    for name in given.parts:
        try:
            for side, found, ran in PARTS[name](given):
                wrong += table.complaints(side, found, ran, written.get(side, {}))
                print(f"{side}: {len(ran)} ran, {len(found)} differ", flush=True)
        except Skipped as skipped:
            print(f"{name}: skipped; {skipped}", flush=True)
    for line in wrong:
        print(line)
    print(f"{len(wrong)} lines of {table.TABLE.name} to mend" if wrong else "as the table says")
    return 1 if wrong else 0


Part = list[tuple[str, Mapping[str, str], list[str]]]  # side, differences, what ran


class Skipped(Exception):
    """Why a part has not run, and how to run it."""


def operators(given: argparse.Namespace) -> Part:
    """torch's own samples of its operators: their table is `tests/capture/op_db.json`."""
    sys.path.insert(0, str(HERE.parent / "capture"))
    command = [sys.executable, str(HERE.parent / "capture" / "op_db.py")]
    done = subprocess.run([*command, *filter(None, [given.only])], capture_output=True, text=True)
    print("\n".join(done.stdout.splitlines()[-3:]))
    return [("operators", {"op_db": done.stderr[-300:]} if done.returncode else {}, ["op_db"])]


def optimizers(given: argparse.Namespace) -> Part:
    from optimizers import differences

    found, ran = differences(given.only)
    return [("optimizers", found, ran)]


def shapes(given: argparse.Namespace) -> Part:
    from scripts import HEAD, difference, row
    from shapes import SHAPES, run

    names, found = [n for n in SHAPES if given.only in n], {}
    print(HEAD.format(n=60))
    for name in names:
        stock, ours = (run(name, side, 60) for side in (False, True))
        print(row(name, stock, ours), flush=True)
        if text := difference(stock, ours):
            found[name] = text
    return [("shapes", found, names)]


def scripts(given: argparse.Namespace) -> Part:
    if given.scripts is None:
        raise Skipped("no package holds the scripts; fix: --scripts a checkout of transformers")
    from scripts import HEAD_AGAIN, SCRIPTS, difference, folder_of, row, run

    folder = folder_of(given.scripts)
    there = {n: s for n, s in SCRIPTS.items() if given.only in n and (folder / s.path).exists()}
    parts: Part = []
    stock: dict[str, Any] = {}
    for side in [given.side] if given.side else ["drop-in", "accelerated"]:
        found: dict[str, str] = {}
        print(f"scripts, {side}\n{HEAD_AGAIN.format(n=60)}")
        for name, script in there.items():
            with tempfile.TemporaryDirectory() as work:
                if name not in stock:
                    stock[name] = run(script, folder, "stock", Path(work))
                ours = run(script, folder, side, Path(work))
                kept = run(script, folder, side, Path(work))
            if stock[name].failed:
                print(f"{name}: stock fails: {stock[name].failed}")
                continue
            if text := difference(stock[name], ours) or difference(stock[name], kept):
                found[name] = text
            if ours.steps and kept.steps:
                print(row(name, stock[name], ours, kept), flush=True)
        ran = [n for n in there if not stock[n].failed]
        parts.append((f"scripts, {side}", found, ran))
    return parts


def trainer_tests(given: argparse.Namespace) -> Part:
    if given.transformers_tests is None:
        raise Skipped(
            "no package holds transformers' tests of its Trainer; fix: --transformers-tests a "
            "checkout of it"
        )
    from trainer_tests import differences, files_of, outcomes

    sides = [given.side] if given.side else ["drop-in", "accelerated"]
    found: dict[str, dict[str, str]] = {side: {} for side in sides}
    ran: list[str] = []
    for file in files_of(given.transformers_tests):
        stock = outcomes(file, "stock", given.only)
        ran += [t for t, (outcome, _) in stock.items() if outcome == "passed"]
        for side in sides:
            found[side] |= differences(stock, outcomes(file, side, given.only))
        print(f"{file.name}: {len(stock)} tests", flush=True)
    return [(f"tests, {side}", found[side], ran) for side in sides]


PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "operators": operators, "optimizers": optimizers, "shapes": shapes, "scripts": scripts,
    "tests": trainer_tests,
}  # fmt: skip

if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
