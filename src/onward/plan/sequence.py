"""The sequence of a plan's collectives, which must be the same on every rank.

Messages and exchanges of two partners are left out, since other ranks have no part in them. Who
sends what to whom in a whole pipeline is in the record of a collective that all ranks share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from onward.graph.ops.collective import MESSAGES, STARTS
from onward.plan.plan import Plan, PlannedLaunch

# attributes of a start in which ranks must agree; sizes of tensors may differ where an op allows it
_SAID = ("axis", "size", "reduction", "root", "distance", "shift", "sequence", "record")


def collectives(plan: Plan) -> list[PlannedLaunch]:
    """The launches that start a collective, in the order in which they run."""
    return [launch for launch in plan.launches if launch.op in STARTS]


def sequence_text(plan: Plan, axes: Collection[str] | None = None) -> str:
    """The sequence of a plan's collectives, one a line: op, types of elements, attributes. axes: of
    those alone that run along one of them; None: all."""
    lines: list[str] = []
    for launch in collectives(plan):
        if launch.op in MESSAGES or "partner" in launch.attrs:
            continue
        if axes is not None and launch.attrs["axis"] not in axes:
            continue
        said = ", ".join(f"{k}={launch.attrs[k]}" for k in _SAID if k in launch.attrs)
        kinds = ", ".join(t.dtype.name.lower() for t in launch.spec.outputs)
        lines.append(f"{launch.op}({kinds}) {{{said}}}\n")
    return "".join(lines)


def sequence_hash(plan: Plan, axes: Collection[str] | None = None) -> str:
    """SHA-256 of the sequence of a plan's collectives, in hex. Ranks whose plans have different
    hashes would wait for one another for ever. axes: as in `sequence_text`."""
    return hashlib.sha256(sequence_text(plan, axes).encode()).hexdigest()


__all__ = ["collectives", "sequence_hash", "sequence_text"]
