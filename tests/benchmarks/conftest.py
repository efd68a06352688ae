"""The suite can be imported, and runs of whole scripts are left to `--whole`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
BENCHMARKS = FOLDER.parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scripts whose quick run takes long stay out, but with `--whole` and where asked for."""
    if config.getoption("--whole") or config.getoption("keyword") or "::" in " ".join(config.args):
        return
    dropped = [
        item for item in items if FOLDER in item.path.parents and item.get_closest_marker("slow")
    ]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]
