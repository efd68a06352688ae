"""The table of what differs, and why: it may only shrink.

A side has its differences by the name of a test or a script, each with its reason. One that is new
is a fault; so is a line whose difference is gone, until it is taken out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

TABLE = Path(__file__).with_name("differences.json")
Written = dict[str, dict[str, str]]


def read(path: Path = TABLE) -> Written:
    return json.loads(path.read_text())


def complaints(
    side: str, found: Mapping[str, str], ran: Collection[str], written: Mapping[str, str]
) -> list[str]:
    """What is wrong with a side's part of the table, for those tests that ran."""
    new = [
        f"{side}: {name} differs: {said}; fix: mend it, or give its reason in {TABLE.name}"
        for name, said in found.items() if name not in written
    ]  # fmt: skip
    gone = [
        f"{side}: {name} differs no longer; fix: take it out of {TABLE.name}"
        for name in written if name in ran and name not in found
    ]  # fmt: skip
    empty = [
        f"{side}: {name} has no reason; fix: say why in {TABLE.name}"
        for name, reason in written.items() if not reason.strip()
    ]  # fmt: skip
    return [*new, *gone, *empty]
