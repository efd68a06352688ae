"""The rules that a plan must satisfy, checked under `ONWARD_CHECK=1`; each has its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onward.plan.plan import Buffer, MemoryRegion, Plan

ARENA = (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH)


def _sizes(plan: Plan) -> Iterator[str]:
    for name in plan.open - plan.dims.keys():
        yield f"the open size {name} has no number"


def _places(plan: Plan) -> Iterator[str]:
    for b in plan.buffers:
        room = plan.arena_bytes if b.region in ARENA else plan.sizes.get(b.region, 0)
        if b.region is not MemoryRegion.USER and not 0 <= b.offset <= room - b.nbytes:
            yield f"buffer {b.name} ends at {b.offset + b.nbytes} of {room} bytes"


def _lives(plan: Plan) -> Iterator[str]:
    for b in plan.buffers:
        if b.region in ARENA and not b.first <= b.last <= len(plan.launches):
            yield f"buffer {b.name} lives from launch {b.first} to {b.last}"


def _overlaps(plan: Plan) -> Iterator[str]:
    alive: list[Buffer] = []
    for b in sorted((b for b in plan.buffers if b.region in ARENA), key=lambda b: b.first):
        alive = [a for a in alive if a.last >= b.first]
        for a in alive:
            if a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes:
                yield f"buffers {a.name} and {b.name} share bytes at launch {b.first}"
        alive.append(b)


def _commit(plan: Plan) -> Iterator[str]:
    for number, launch in enumerate(plan.launches[: plan.commit]):
        for y in launch.outputs:
            if plan.buffers[y.buffer].region is MemoryRegion.USER:
                yield f"launch {number} writes {plan.buffers[y.buffer].name} before the commit"


def _cuts(plan: Plan) -> Iterator[str]:
    if any(not 0 <= cut <= len(plan.launches) for cut in plan.cuts):
        yield f"the cuts {plan.cuts} are not all among {len(plan.launches)} launches"
    if list(plan.cuts) != sorted(plan.cuts):
        yield f"the cuts {plan.cuts} are not in order"


RULES: tuple[tuple[str, Callable[[Plan], Iterator[str]], str], ...] = (
    ("sizes", _sizes, "a batch is compared with the numbers planned for"),
    ("places", _places, "each region is allocated once, at its size"),
    ("lives", _lives, "a buffer is read at most one launch behind the last"),
    ("overlaps", _overlaps, "what is alive is read again"),
    ("commit", _commit, "a step that fails before its commit has changed nothing"),
    ("cuts", _cuts, "a run stops before each cut, in their order"),
)


def conform_plan(plan: Plan) -> None:
    """Raises AssertionError with the rule that a plan breaks, and with the reason."""
    for name, breaks, reason in RULES:
        for what in breaks(plan):
            raise AssertionError(f"after plan, {name}: {what}; since {reason}")
