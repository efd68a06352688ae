"""Onward's own commands in processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import onward

# this process's code, wherever it was imported from; the user's folder stays out of the way
_LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from onward.cli import main; sys.exit(main())"
)


def own_command(*words: str) -> list[str]:
    """The command line that runs `onward` with these words, by this interpreter and these
    sources."""
    package_root = str(Path(onward.__file__).resolve().parents[1])
    return [sys.executable, "-c", _LAUNCH, package_root, *words]


__all__ = ["own_command"]
