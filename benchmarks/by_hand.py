"""Whether the peers that spare rows by hand give the model's own loss and gradients.

    python benchmarks/by_hand.py
    python benchmarks/by_hand.py --quick   # a tiny model

The peers of row_demand.py (suite/by_hand.py) hold the modules of the model that they are given.
Without dropout their loss is the model's to 1e-5, and each gradient to 1e-4 of the largest one.
Exit status 1: it is not.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from suite import cases
from suite.cli import CommandLine, finished, writer
from suite.peer_check import differences, failed, table
from suite.progress import Clock
from suite.report import started


def main() -> int:
    """Check both peers on both padded workloads."""
    line = CommandLine(__doc__, cases=True)
    options = line.read()
    clock = Clock(0.0)
    report = started("Rows spared by hand, beside the model itself")
    report["rows"] = [
        row
        for case in cases.chosen(cases.PADDED, options.cases, options.quick)
        for row in differences(replace(case, dropout=0.0))
    ]
    finished(table(report), writer(options, "by_hand")(report, table(report)), clock)
    return int(failed(report))


if __name__ == "__main__":
    sys.exit(main())
