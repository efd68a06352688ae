"""The suite of the benchmarks can be imported: its harness of faults runs here with a few cases."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
