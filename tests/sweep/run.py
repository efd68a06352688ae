"""Every model class of transformers that has a loss, tiny, against eager.

`python tests/sweep/run.py [--only PATTERN] [--kind KIND] [--one-per-family] [--out FILE]` tries
each in a process of its own with limits of time and memory, and adds a line of JSON: `equal`,
`refused` (Onward says why), `WRONG` numbers, `CRASH`, `eager-fails`, `timeout`. What the file has
already is skipped. `page.py` makes docs/models.md of it.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import torch
import transformers
from classes import Entry, entries, import_all
from modules import TASK, module_entries
from no_torchvision import import_timm
from outcome import outcome
from page import rows_of

SECONDS = 60  # of the processor's time
WALL = 6  # as many times that in all, where others use the machine
BYTES = 6 << 30
KINDS = ("text", "vision", "speech", "multimodal", "other")


def alone(entry: Entry, pipe: Any, export: bool, limit: float, stack: Path) -> None:
    """In a process of its own: says each phase, then the row; before its end, where it is."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 1))
    warnings.simplefilter("ignore")
    with Path(os.devnull).open("w") as nowhere, stack.open("w") as lines:
        sys.stdout = sys.stderr = nowhere
        faulthandler.register(signal.SIGPROF, file=lines)
        signal.setitimer(signal.ITIMER_PROF, max(1.0, limit - 1))
        pipe.send(outcome(entry, pipe.send, export))


def tried(entry: Entry, export: bool, limit: float) -> dict[str, Any]:
    """The row of a class, also where its process did not live to say it."""
    context = multiprocessing.get_context("fork")  # what is imported is imported once
    handle, name = tempfile.mkstemp()
    os.close(handle)
    stack = Path(name)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=alone, args=(entry, theirs, export, limit, stack))
    began = time.monotonic()
    process.start()
    theirs.close()
    phase, row = "start", None
    try:
        while row is None and ours.poll(max(0.0, began + WALL * limit - time.monotonic())):
            said = ours.recv()
            phase, row = (said, None) if isinstance(said, str) else (phase, said)
        status = "timeout"
    except EOFError:
        process.join()
        status = "timeout" if process.exitcode == -signal.SIGXCPU else "CRASH"
    process.kill()
    process.join()
    where = stack.read_text()
    stack.unlink()
    if row is not None:
        return row
    ended = f"ended with {process.exitcode}"
    reason = f"in {phase}: {place(where) if status == 'timeout' else ended}"
    return {"family": entry.family, "class": entry.name, "kind": entry.kind, "task": entry.task,
            "loss": "", "status": status, "reason": reason, "export_ok": None, "export_reason": "",
            "seconds": round(time.monotonic() - began, 1), "second_capture": None,
            "note": ""}  # fmt: skip


def place(stack: str) -> str:
    """The innermost lines of the model and of Onward, of a stack that faulthandler wrote."""
    lines = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    found = []
    for folder in ("transformers/models/", "src/onward/"):
        match = [(f, n, name) for f, n, name in lines if folder in f]
        found += [f"{f.partition(folder)[2]} {name}" for f, _, name in match[:1]]
    return ", ".join(found)


def chosen(options: argparse.Namespace) -> list[Entry]:
    """The classes asked for; of those that can be imported."""
    found = [*module_entries(), *entries()]
    if options.one_per_family:
        first: dict[str, Entry] = {}
        for entry in found:
            first.setdefault(entry.name if entry.task == TASK else entry.family, entry)
        found = list(first.values())
    if options.only:
        found = [e for e in found if re.search(options.only, f"{e.family}/{e.name}")]
    if options.mixed:
        found.sort(key=lambda e: hashlib.sha256(e.name.encode()).digest())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="a pattern of family/class")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--one-per-family", action="store_true")
    parser.add_argument("--mixed", action="store_true", help="in an order that has no order")
    parser.add_argument("--limit", type=int, help="so many classes at most")
    parser.add_argument("--out", type=Path, default=Path("sweep.jsonl"))
    parser.add_argument("--again", default="", help="statuses to try again: eager-fails,timeout")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one class")
    parser.add_argument("--no-export", action="store_true", help="torch.export is not asked")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    import_timm()  # before transformers' backbones of it are
    missing = import_all()
    done = set()
    if options.out.exists():
        again = set(options.again.split(","))
        done = {r["class"] for r in rows_of(options.out) if r["status"] not in again}
    waiting = []
    for entry in chosen(options):
        if entry.name in done:
            continue
        if entry.family in missing:
            row = {"family": entry.family, "class": entry.name, "kind": "other",
                   "task": entry.task, "status": "eager-fails", "reason": missing[entry.family],
                   "loss": "", "export_ok": None, "export_reason": "", "seconds": 0.0,
                   "second_capture": None, "note": ""}  # fmt: skip
            _add(options.out, row)
        elif options.kind in (None, entry.kind):
            waiting.append(entry)
    waiting = waiting[: options.limit]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = pool.map(lambda e: tried(e, not options.no_export, options.seconds), waiting)
        for n, row in enumerate(rows, 1):
            _add(options.out, row)
            print(f"{n}/{len(waiting)} {row['family']}/{row['class']}: {row['status']} "
                  f"({row['seconds']} s) {row['reason'][:120]}", flush=True)  # fmt: skip


def _add(out: Path, row: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
