"""Loads files that a stranger may have made, from seeds, and says which loads go wrong.

python tests/fuzz/files/run.py --seconds 600
python tests/fuzz/files/run.py --format weights --seed 17 --count 1 --show
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from fuzz.workers import Process

HERE = Path(__file__).parent
PATIENCE = 300.0  # seconds for one case, however busy the machine is
LONGEST = 20.0  # seconds of processor time for one case, after which its worker is ended
# cases of each format in one round, as many as take about equal times
SHARES = {
    "weights": 30, "model": 3, "index": 4, "config": 4, "tokenizer": 4, "checkpoint": 15,
    "resume": 4, "record": 15, "graph": 15, "capture": 6, "onnx": 15, "session": 8,
}  # fmt: skip


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--count", type=int, default=20_000, help="cases, over all formats")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop then, whatever was done")
    parser.add_argument("--seed", type=int, default=0, help="the first; -1: from the clock")
    parser.add_argument("--format", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--show", action="store_true", help="every verdict, and refusals by text")
    parser.add_argument("--keep", type=Path, help="a new folder for the files of the last case")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def prepare() -> None:
    """One thread, no network, no lines of the libraries' own, a cache of its own."""
    import logging
    import warnings

    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["ONWARD_GRAPH_CACHE"] = "0"  # a load that is watched writes nothing
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def serve(root: Path) -> None:
    """A worker: a format and a seed a line on stdin, a verdict a line on stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no verdict
    faulthandler.enable()
    os.environ["ONWARD_CACHE"] = str(root / "cache")
    prepare()
    from fuzz.files.formats import FORMATS
    from fuzz.files.judge import Judge

    judge = Judge(root, FORMATS)
    limited: set[str] = set()
    for line in sys.stdin:
        name, seed = line.split()
        if name not in limited:  # what a format imports counts as there
            judge.prepare(name)
            judge.sandbox.limit_memory()
            limited.add(name)
        signal.setitimer(signal.ITIMER_PROF, LONGEST)
        verdict = judge.judge(name, int(seed))
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(json.dumps({**verdict._asdict(), "finding": verdict.finding}) + "\n")
        out.flush()


class FileWorker(Process):
    """A process that judges cases."""

    def __init__(self, root: Path, command: Sequence[str] = ()) -> None:
        own = (sys.executable, str(HERE / "run.py"), "--serve", str(root))
        self.said = root.with_suffix(".txt")
        super().__init__(tuple(command) or own, self.said)

    def judge(self, name: str, seed: int) -> dict[str, Any]:
        found = self.ask(f"{name} {seed}", PATIENCE)
        if not isinstance(found, int):
            return found
        what = f"more than {LONGEST:.0f} s" if found == -signal.SIGPROF else f"exit {found}"
        return {
            "format": name, "seed": seed, "kind": "crash", "signature": f"crash: {what}",
            "detail": f"{what}: {self.said.read_text()[-2000:]}", "seconds": 0.0, "finding": True,
        }  # fmt: skip


def cases(names: list[str], first: int, count: int) -> Iterator[tuple[str, int]]:
    """Formats with seeds, each format by its share; a format's seeds go up from the first."""
    seeds = {name: itertools.count(first) for name in names}
    order = [
        name for _, name in sorted((i / SHARES[n], n) for n in names for i in range(SHARES[n]))
    ]
    for name in itertools.islice(itertools.cycle(order), count):
        yield name, next(seeds[name])


def campaign(said: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Judges the cases with several workers; returns the verdicts."""
    first = int(time.time()) * 1000 % 2**31 if said.seed < 0 else said.seed
    print(f"fuzz-files: seeds from {first}", flush=True)
    left = cases(said.format, first, said.count)
    lock = threading.Lock()
    end = time.monotonic() + (said.seconds or 1e9)
    found: list[dict[str, Any]] = []
    told: set[str] = set()

    def work(number: int) -> None:
        worker = FileWorker(root / str(number))
        while time.monotonic() < end:
            with lock:
                case = next(left, None)
            if case is None:
                break
            verdict = worker.judge(*case)
            with lock:
                found.append(verdict)
                if said.show or (verdict["finding"] and verdict["signature"] not in told):
                    told.add(verdict["signature"])
                    print(
                        f"{case[0]} {case[1]}: {verdict['kind']}: {verdict['detail']}", flush=True
                    )
        worker.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(said.workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # what was found so far is worth a report
        end = 0.0
        for thread in threads:
            thread.join()
    return found


def report(found: list[dict[str, Any]]) -> None:
    for name in SHARES:
        own = [v for v in found if v["format"] == name]
        if own:
            kinds = Counter(v["kind"] for v in own).most_common()
            seconds = sum(v["seconds"] for v in own) / len(own)
            words = ", ".join(f"{n} {kind}" for kind, n in kinds)
            print(f"{name}: {len(own)} cases, {1000 * seconds:.1f} ms each: {words}")
    causes = Counter((v["format"], v["signature"]) for v in found if v["finding"])
    print(f"{len(found)} cases, {sum(causes.values())} findings" + (":" if causes else ""))
    for (name, cause), n in causes.most_common():
        seeds = sorted(v["seed"] for v in found if (v["format"], v["signature"]) == (name, cause))
        print(f"  {n:4} {name}: {cause} (seeds {', '.join(map(str, seeds[:5]))})")
    for name, cause in list(causes)[:1]:
        seed = next(v["seed"] for v in found if (v["format"], v["signature"]) == (name, cause))
        command = f"python tests/fuzz/files/run.py --format {name} --seed {seed} --count 1"
        print(f"reproduce: {command} --show --keep FOLDER")


def main() -> int:
    said = options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if said.serve:
        serve(said.serve)
        return 0
    with tempfile.TemporaryDirectory(prefix="onward-files-") as root:
        found = campaign(said, Path(root))
        if said.keep:
            shutil.copytree(Path(root, "0", "case"), said.keep, symlinks=True)
    report(found)
    return 1 if any(v["finding"] for v in found) else 0


if __name__ == "__main__":
    sys.exit(main())
