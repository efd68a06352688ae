"""Finds the origin of infinite and NaN gradients: the launches of a step run one by one, and what
each reads and writes is looked at.

An infinite number alone is no fault: masks hold -inf. So the search goes backward from gradients
that are not finite, over operands that are not finite either, to where there is no such operand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from onward.execute import Executable
from onward.graph.names import BATCH, BUFFER, PARAM, user_name
from onward.graph.ops.collective import STARTS, WAIT
from onward.plan import Layout, Plan

_KINDS = {BATCH: "batch", BUFFER: "buffer", PARAM: "parameter"}  # of inputs, by the name's start


class Finiteness(IntEnum):
    """What the worst number of a tensor is."""

    FINITE = 0
    INFINITE = 1
    NAN = 2

    @property
    def words(self) -> str:
        """The kind of number, for a message."""
        return {0: "finite numbers", 1: "an infinite number", 2: "NaN"}[self]


@dataclass(frozen=True)
class NonfiniteOrigin:
    """Where the infinite or NaN numbers of a step's gradients come from.

    name: of the op that wrote them, or of the input that held them. module: path of the module that
    the op belongs to; empty for an input. kind: "op", "constant", or of an input "batch",
    "buffer", "parameter" or "state" (such as sums of the gradients of earlier micro-batches).
    worst: NaN or infinite. backward: whether the op computes gradients. infinite: for an op that
    makes NaN of infinite numbers, such as inf - inf, where those come from.
    """

    name: str
    module: str
    kind: str
    worst: Finiteness
    backward: bool = False
    infinite: NonfiniteOrigin | None = None

    @property
    def is_of_others(self) -> bool:
        """Says whether an exchange between ranks has brought the numbers, so that another rank has
        the origin."""
        return self.name == WAIT

    def __str__(self) -> str:
        if self.kind != "op":
            what = f"the {self.kind} {self.name!r}" if self.name else f"a {self.kind}"
            return f"{what} holds {self.worst.words}"
        if self.is_of_others:
            return f"another rank's numbers bring {self.worst.words}"
        half = "backward" if self.backward else "forward"
        place = f" of {self.module}" if self.module not in ("", "(top)") else ""
        text = f"{self.name}{place} ({half}) is the first op that makes {self.worst.words}"
        return text if self.infinite is None else f"{text}; before, {self.infinite}"


@dataclass(frozen=True)
class _Operand:
    """An operand of a launch that is not finite. writers: the launches that wrote numbers that are
    not finite to its buffer; none for an input of the graph."""

    buffer: int
    worst: Finiteness
    writers: tuple[int, ...]


class _Watch:
    """Looks at the operands of each launch, before and after it."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable
        self._launches = executable.plan.launches
        self._writers: dict[int, list[int]] = defaultdict(list)  # by buffer
        self.read: dict[int, list[_Operand]] = {}  # by launch
        self.wrote: dict[int, Finiteness] = {}
        self._starts: dict[int, int] = {}  # launches of exchanges, by their number

    def before(self, number: int) -> None:
        launch = self._launches[number]
        if launch.op == WAIT:  # what arrives is in the memory of its inputs already
            self.read[number] = self.read[self._starts[launch.attrs["sequence"]]]
            return
        found: list[_Operand] = []
        for layout in self._launches[number].inputs:
            worst = Finiteness.FINITE if layout is None else self._worst(layout)
            if layout is not None and worst:
                # an op in place may have made NaN of infinite numbers in the same buffer
                late = self._writers[layout.buffer]
                writers = tuple([i for i in late if self.wrote[i] >= worst])
                found.append(_Operand(layout.buffer, worst, writers))
        self.read[number] = found

    def after(self, number: int) -> None:
        launch = self._launches[number]
        if launch.op in STARTS:  # its results have not arrived
            self._starts[launch.attrs["sequence"]] = number
            self.wrote[number] = Finiteness.FINITE
            return
        worsts = {layout.buffer: self._worst(layout) for layout in self._launches[number].outputs}
        self.wrote[number] = max(worsts.values(), default=Finiteness.FINITE)
        for buffer, worst in worsts.items():
            if worst:
                self._writers[buffer].append(number)

    def _worst(self, layout: Layout) -> Finiteness:
        """Looks at the numbers of a window. Integers and codes of 8 bits are finite."""
        if not torch.is_floating_point(x := self._executable.tensor(layout)):
            return Finiteness.FINITE
        if x.element_size() == 1 or bool(torch.isfinite(x).all()):
            return Finiteness.FINITE
        return Finiteness.NAN if bool(torch.isnan(x).any()) else Finiteness.INFINITE


def nonfinite_origin(
    executable: Executable, inputs: Mapping[str, Any], dims: Mapping[str, int]
) -> NonfiniteOrigin | None:
    """Runs a step once more up to its update, and finds where the numbers come from that make its
    gradients infinite or NaN. None where all gradients are finite. Writes no weights.

    Needs one pass over the operands of each launch; on a GPU each look waits for the device.
    """
    plan = executable.plan
    finite = plan.signature.finite
    if finite is None:
        return None
    watch = _Watch(executable)
    executable.watch(inputs, dims, watch.before, watch.after)
    flag = plan.outputs[finite].buffer
    test = max(i for i in watch.read if any(y.buffer == flag for y in plan.launches[i].outputs))
    return _origin(plan, watch, _first_read(plan, watch, test))


def _first_read(plan: Plan, watch: _Watch, test: int) -> list[_Operand]:
    """The operands that are not finite nearest before the launch that writes the flag: ranks
    exchange a count between the two."""
    writers: dict[int, list[int]] = defaultdict(list)
    for number, launch in enumerate(plan.launches):
        for y in launch.outputs:
            writers[y.buffer].append(number)
    todo, seen, found = [test], set[int](), list[_Operand]()
    while todo:
        number = todo.pop()
        if number in seen:
            continue
        seen.add(number)
        if watch.read[number]:
            found += watch.read[number]
            continue
        for x in plan.launches[number].inputs:
            wrote = [] if x is None else writers[x.buffer]
            todo += wrote[: bisect_left(wrote, number)][-1:]
    return found


def _origin(plan: Plan, watch: _Watch, start: Sequence[_Operand]) -> NonfiniteOrigin | None:
    """Searches backward from operands that are not finite. Returns the first of what it arrives at:
    an input, else the launch that comes first in the step; None without operands."""
    todo, seen = list(start), set[int]()
    inputs: list[_Operand] = []
    launches: list[int] = []
    while todo:
        operand = todo.pop()
        if not operand.writers:
            inputs.append(operand)
        for number in operand.writers:
            if number in seen:
                continue
            seen.add(number)
            read = [x for x in watch.read[number] if x.worst >= watch.wrote[number]]
            if not read:
                launches.append(number)
            todo += read
    if inputs:
        return _input_origin(plan, inputs)
    if not launches:
        return None
    first = min(launches)
    launch, infinite = plan.launches[first], watch.read[first]
    before = _origin(plan, watch, infinite) if infinite else None
    return NonfiniteOrigin(
        launch.op, launch.module, "op", watch.wrote[first], launch.backward, before
    )


def _input_origin(plan: Plan, operands: Sequence[_Operand]) -> NonfiniteOrigin:
    names = {layout.buffer: name for name, layout in plan.inputs.items()}
    held = {names[x.buffer]: x.worst for x in operands if x.buffer in names}
    if not held:
        return NonfiniteOrigin("", "", "constant", operands[0].worst)
    # batch.* before buffer.* before param.*: a batch that is wrong is the more likely reason
    name = min(held, key=lambda n: next((i for i, p in enumerate(_KINDS) if n.startswith(p)), 9))
    kind = next((k for p, k in _KINDS.items() if name.startswith(p)), "state")
    return NonfiniteOrigin(user_name(name), "", kind, held[name])


__all__ = ["Finiteness", "NonfiniteOrigin", "nonfinite_origin"]
