"""A fast estimate of a plan's memory: lifetimes and in-place writes, but no offsets.

The search for values to recompute calls it hundreds of times, and the planner only once for each
proposal. Both use the same lifetimes (`plan/liveness.py`). The caller corrects, from a real plan,
what the estimate leaves out: gaps between buffers, and launches that the planner would order
differently once the backward half reads other values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from onward.graph.graph import Graph, Node
from onward.kernels import Kernel
from onward.plan.liveness import Liveness, Simulator
from onward.plan.order import forward_half, order
from onward.plan.placement import arena_bytes_throughout
from onward.plan.storages import Storages


@dataclass(frozen=True)
class Estimate:
    """An estimate of a plan's memory. nbytes: the most bytes alive at one launch. movable: storages
    alive at that launch but not used by it, made by the forward half and next read by the backward
    half."""

    nbytes: int
    movable: tuple[int, ...]


class MemoryEstimate:
    """Estimates the memory of a graph that `select` has lowered, with any forward launches
    recomputed.

    nodes, makes, reads, backward: of each access, in order. nbytes, maker: of each storage; maker
    is None for inputs and constants. fixed: storages that recomputation cannot free (inputs,
    constants, outputs, storages that several launches write). late: storages of the forward half
    that the backward half reads. repeatable: forward launches that can run again: they share no
    storage with other launches, no output shows their results through a window of the backward
    half, and no region reads them.
    """

    def __init__(self, graph: Graph, kernels: dict[Node, Kernel]) -> None:
        half = len(forward_half(graph)) if graph.signature.split_halves else 0
        self._storages = found = Storages(graph, kernels, order(graph), half)
        self._simulator = Simulator(found)
        self._throughout = arena_bytes_throughout(found)
        self.nodes = [access.node for access in found.accesses]
        self.makes = [access.makes for access in found.accesses]
        self.reads = [access.reads for access in found.accesses]
        self.backward = [access.is_backward for access in found.accesses]
        self.nbytes, self.maker = found.nbytes, found.maker
        self.fixed = found.kept | found.shown | found.shared
        self.fixed |= {i for i, maker in enumerate(self.maker) if maker is None}
        outputs = [(v, v.producer()) for v in graph.outputs.values()]
        # else the proposal would decide whether such an output shows a launch or its second run
        shown_late = {
            found.layouts[v].buffer for v, maker in outputs if maker and maker.meta.get("backward")
        }
        # a region's code runs once, and autograd has saved what it read
        parts = {n for n, node in enumerate(self.nodes) if node.op_type == "Region"}
        taped = {s for n in parts for s in (*self.reads[n], *self.makes[n])}
        # collectives are among the shared ones, since both their halves make their results: a rank
        # that repeats one would wait for the others, which do not
        singular = shown_late | found.shared | taped
        self.repeatable = [
            not access.is_backward
            and len(access.makes) == len(access.node.outputs)
            and singular.isdisjoint(access.makes)
            for access in found.accesses
        ]
        self.late = {
            s
            for access in found.accesses
            if access.is_backward
            for s in access.reads
            if (maker := self.maker[s]) is not None and not self.backward[maker]
        }

    def estimate(self, again: Collection[int]) -> Estimate:
        """Estimates the memory with the forward launches `again` run a second time, each just
        before the first launch that needs it."""
        lives = self._simulator.run(again)
        if not lives.end:
            return Estimate(self._throughout, ())
        place = int(lives.nbytes.argmax())
        return Estimate(self._throughout + int(lives.nbytes[place]), self._movable(lives, place))

    def _movable(self, lives: Liveness, place: int) -> tuple[int, ...]:
        """The storages that are idle at `place`, waiting for the backward half."""
        size = len(self.nbytes)
        first, late = lives.first[:size], lives.late[:size]
        waiting = np.flatnonzero((first < place) & (place < late) & (late < lives.end))
        busy = {s for i in np.flatnonzero(lives.at == place) for s in self.reads[i]}
        busy |= {s for m, at in lives.again.items() if at == place for s in self.reads[m]}
        return tuple(s for s in waiting.tolist() if s not in busy and s not in self.fixed)

    def sequence(self, again: Collection[int]) -> list[tuple[Node, bool]]:
        """The nodes in the assumed order, each with whether that is its second run."""
        lives = self._simulator.run(again)
        places = [(int(at), self.nodes[i], False) for i, at in enumerate(lives.at)]
        places += [(at, self.nodes[m], True) for m, at in lives.again.items()]
        return [(node, is_again) for _, node, is_again in sorted(places, key=lambda p: p[0])]

    def values(self, again: Collection[int]) -> set[str]:
        """Names of the values that these launches make, and of forward views of them."""
        names: set[str] = set()
        for i in again:
            names.update(v.name or "" for v in self.nodes[i].outputs)
            for s in self.makes[i]:
                for window in self._storages.windows[s]:
                    if not window.meta.get("backward"):
                        names.update(v.name or "" for v in window.outputs)
        return names
