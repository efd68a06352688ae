"""Prints the number of processes for this machine, and the threads of each: `2 8`.

    python processes.py [PROCESSES]

One process for each GPU, else one. Their threads share PyTorch's own number, the cores, or what the
container's quota of processors allows where that is less, as a single process of Onward has it.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

from onward.kernels.quota import quota


def shares(processes: int | None, root: Path = Path("/")) -> tuple[int, int]:
    """The processes, and the threads of each. processes: as wanted. root: of the file system."""
    count = processes or torch.cuda.device_count() or 1
    allowed = quota(root)
    threads = torch.get_num_threads() if allowed is None else math.ceil(allowed)
    return count, max(1, min(threads, torch.get_num_threads()) // count)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1 or not all(x.isdecimal() and int(x) > 0 for x in arguments):
        raise SystemExit(f"processes.py: {' '.join(arguments)} is no number of processes; fix: 2")
    print(*shares(int(arguments[0]) if arguments else None))


if __name__ == "__main__":
    main(sys.argv[1:])
