"""Put faults into training runs of three systems, and count what each makes of them.

    python benchmarks/reliability.py                      # an hour and more on two cores
    python benchmarks/reliability.py --quick              # few cases of each row, to try the script
    python benchmarks/reliability.py --only R33 --merge   # one row anew, the others from the newest
                                                          # report in the folder

Rows: runs that are killed within a save (R1) and at random (R2), damaged checkpoints (R3), resuming
bit for bit (R6), signals (R8), ranks that are lost, hang or are unlike (R9 to R11), numbers that
are not finite (R12), saves in the background (R32), the time of a recovery (R33), the cost of
verification (R34). One harness runs them over Onward, transformers' Trainer and accelerate, with
the same tiny GPT-2 on the CPU; `suite/fault_systems.py` has the three scripts. Rows of ranks have
DistributedDataParallel by hand in accelerate's place (`suite/rank_faults_program.py`). R1 needs
strace. R32 to R34 are times, to be measured on a quiet machine.

Loss spikes (`spikes`, of Onward alone): a small GPT-2 learns real text; into the same state of it
come 200 flipped bits of exponents of weights, and 200 batches with labels at random. A fault is
found if one of the three updates from it on is left out. Runs of 1,000 updates without a fault, at
three learning rates, count false alarms. Most flipped bits change the loss by less than its noise:
the table says how far the loss rose at most where a fault was missed. The text is the language
reference that Python's pydoc carries unless `--text` names a file.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch

from suite import fault_rows, spikes
from suite.cli import CommandLine, finished, writer
from suite.fault_systems import SYSTEMS
from suite.fault_table import QUICK, Effort
from suite.held_out_text import read
from suite.progress import Clock, say
from suite.report import heading, started

SPIKES = "spikes"
NAME = "reliability"


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, budget=7200.0, threads=True)
    line.add_argument("--text", type=Path, help="training text; default: pydoc's topics")
    line.add_argument("--only", default="", help="comma-separated rows; default: all")
    line.add_argument("--systems", default="", help="comma-separated; default: all three")
    line.add_argument("--share", type=float, default=1.0, help="of the cases; default: all, 1")
    line.add_argument(
        "--merge", action="store_true", help="keep the other rows of the newest report"
    )
    options = line.read()
    names = line.names("row", options.only, [*fault_rows.ROWS, SPIKES])
    systems = line.names("system", options.systems, list(SYSTEMS))
    if not 0 < options.share <= 1:
        line.error(f"no share between 0 and 1: {options.share}")
    if set(names) & set(fault_rows.NEEDS_STRACE) and not shutil.which("strace"):
        line.error("R1 needs strace; fix: install it, or leave R1 out with --only")
    torch.set_num_threads(options.threads or 1)  # forks have no pools of threads
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads or 1))  # of new processes
    size = spikes.QUICK if options.quick else spikes.Size()
    effort = QUICK if options.quick else Effort().part(options.share)
    clock = Clock(options.budget)
    report = started("Faults that are put into training", threads=options.threads or 1)
    stem = f"{NAME}-quick" if options.quick else NAME
    before = fault_rows.earlier(options.out, stem) if options.merge else {}
    rows = report["rows"] = dict(before.get("rows", {}))
    report["loss spikes"] = before.get("loss spikes")
    if report["loss spikes"]:
        report["loss spikes"].setdefault("machine", fault_rows.measured_on(before["machine"]))
    target = writer(options, NAME)
    if set(names) - {SPIKES, *fault_rows.OF_RANKS}:
        fault_rows.warmed(systems)
    for name in names:
        if clock.over():
            break
        say(f"{name} ...")
        if name == SPIKES:
            try:
                data = read(options.text, None, size.vocabulary)
            except (OSError, UnicodeDecodeError) as error:
                line.error(f"{error}; fix: a UTF-8 text file for --text")
            found = spikes.measured(size, data, clock)
            report["loss spikes"] = {**found, "machine": fault_rows.measured_on(report["machine"])}
        else:
            try:
                rows[name] = fault_rows.measured(name, effort, systems, clock, report)
            except RuntimeError as error:
                say(f"{name} has failed: {error}")
        text = "\n".join([*heading(report), *fault_rows.page(rows), *spikes_page(report)])
        path = target(report, text)  # after each row: a long run may be stopped
    finished(text, path, clock)
    return 0


def spikes_page(report: dict[str, object]) -> list[str]:
    """The section on loss spikes, where they were measured."""
    found = report["loss spikes"]
    if not isinstance(found, dict):
        return []
    return ["", "## Loss spikes", "", *spikes.table(found), "", found["machine"]]


if __name__ == "__main__":
    sys.exit(main())
