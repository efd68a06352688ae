"""Put faults into training runs, and count what is noticed.

    python benchmarks/reliability.py           # some minutes on two cores
    python benchmarks/reliability.py --quick   # a tiny model and few faults, to try the script

Loss spikes (`TrainerOptions.loss_spikes`): a small GPT-2 learns real text; into the same state of
it come 200 flipped bits of exponents of weights, and 200 batches with labels at random. A fault is
found if one of the three updates from it on is left out. Runs of 1,000 updates without a fault, at
three learning rates, count false alarms. Most flipped bits change the loss by less than its noise:
the table says how far the loss rose at most where a fault was missed.

The text is the language reference that Python's pydoc carries unless `--text` names a file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from suite import spikes
from suite.cli import CommandLine, finished, writer
from suite.held_out_text import read
from suite.progress import Clock
from suite.report import heading, started


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, budget=900.0, threads=True)
    line.add_argument("--text", type=Path, help="training text; default: pydoc's topics")
    options = line.read()
    if options.threads:
        torch.set_num_threads(options.threads)
    size = spikes.QUICK if options.quick else spikes.Size()
    clock = Clock(options.budget)
    try:
        data = read(options.text, None, size.vocabulary)
    except (OSError, UnicodeDecodeError) as error:
        line.error(f"{error}; fix: a UTF-8 text file for --text")
    report = started("Faults that are put into training", threads=options.threads)
    report["loss spikes"] = spikes.measured(size, data, clock)
    text = "\n".join(
        [*heading(report), "", "## Loss spikes", "", *spikes.table(report["loss spikes"])]
    )
    path = writer(options, "reliability")(report, text)
    finished(text, path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
