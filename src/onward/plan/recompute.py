"""The search for values to recompute, so that a step fits a memory budget.

A proposal is a set of forward launches that run again in the backward half (`rewrite/recompute.py`
applies it). It grows greedily: among the storages that are idle at the launch with most memory in
use, the next is the one that frees most bytes per second of computing, together with the chain of
launches that makes it from values still kept. So LayerNorm and GELU outputs go first, products
later. An addition that does not lower the peak is undone. When no addition helps, layers are
checkpointed: only values that pass from layer to layer are kept, and the search continues from
there. Finally launches that need not run again are removed, slowest first.

The search uses an estimate of the plan's memory (`plan/estimate.py`); a real plan judges each
proposal.
"""

from __future__ import annotations

from collections.abc import Iterator

from onward.errors import OnwardError
from onward.graph.graph import Graph, Node, where
from onward.kernels import Target
from onward.plan.cost import seconds
from onward.plan.estimate import MemoryEstimate
from onward.plan.order import sort
from onward.plan.plan import MemoryRegion, Plan
from onward.plan.select import select

ROUNDS = 6  # proposals before giving up
SMALLEST = 1 / 2000  # of the peak: smaller storages are not considered
SLOWEST = 1 / 200  # of all recomputation time: faster launches are not worth removing


def between(least: int, most: int, fraction: float) -> int:
    """Converts a fraction to bytes of a budget. least: the smallest peak (0.0). most: the peak
    without recomputation (1.0)."""
    return least + int(fraction * max(0, most - least))


class Search:
    """The search for proposals for one specialized graph and a limit in bytes.

    graph: the specialized graph as `select` lowers it; proposals use the names of its values.
    """

    def __init__(self, graph: Graph, limit: int, unconstrained: Plan, target: Target) -> None:
        self.graph = graph.clone()
        self.limit = limit
        self.unconstrained, self._machine = unconstrained, target
        kernels = select(self.graph, target)
        sort(self.graph)  # into launch order, which decides what is the first reader
        self._memory = memory = MemoryEstimate(self.graph, kernels)
        self._seconds = [seconds(node, target) for node in memory.nodes]
        self._again: set[int] = set()
        self._now = memory.estimate(self._again)
        # bytes that the estimate does not count
        self._unseen = unconstrained.peak - self._now.nbytes
        self._smallest = unconstrained.peak
        # storages that did not lower the peak since the last success
        self._useless: set[int] = set()
        self._layers_tried = False

    # ---- between search and plan

    def proposals(self) -> Iterator[set[str]]:
        """Yields sets of values to recompute; the caller passes the plan of each to `judge`.

        If none fits, a search without a limit follows: it may reach a smaller peak on another path,
        and the error must name a peak that can be had.
        """
        yield from self._towards_limit()
        if self.limit > 0:
            yield from Search(self.graph, 0, self.unconstrained, self._machine)._towards_limit()

    def _towards_limit(self) -> Iterator[set[str]]:
        proposed = [self._again]
        for _ in range(ROUNDS):
            self._shrink()
            self._prune()
            if self._again in proposed:
                return
            proposed.append(self._again)
            yield self._memory.values(self._again)

    def layers(self) -> set[str]:
        """The values that layers do not pass on, as a proposal."""
        self._again = self._inside_layers()
        self._now = self._memory.estimate(self._again)
        self._prune()
        return self._memory.values(self._again)

    def judge(self, plan: Plan) -> None:
        """Receives the real plan of the last proposal."""
        self._smallest = min(self._smallest, plan.peak)
        self._unseen = max(self._unseen, plan.peak - self._now.nbytes)

    def error(self) -> OnwardError:
        """The error for a budget that cannot be met, with the bytes lacking and a fix."""
        lasting = self.unconstrained.sizes[MemoryRegion.PERSISTENT]
        return OnwardError(
            f"memory_budget of {self.limit} bytes is {self._smallest - self.limit} bytes too "
            f"small for this batch: with recomputing the step's peak is {self._smallest} "
            f"({lasting} of them optimizer state and constants; {self.unconstrained.peak} "
            f"without recomputing); fix: memory_budget={self._smallest} or more, a fraction "
            "(0.0 to 1.0), or a smaller batch"
        )

    # ---- the search

    @property
    def _target(self) -> int:
        return self.limit - self._unseen

    def _shrink(self) -> None:
        """Recomputes more until the estimate fits or nothing lowers its peak."""
        while self._now.nbytes > self._target:
            step = self._best_step()
            if step is not None:
                storage, chain = step
                before = self._now.nbytes
                if not self._move(self._again | chain):
                    self._useless.add(storage)
                elif self._now.nbytes < before:
                    self._useless.clear()
            elif not self._layers_tried:
                self._layers_tried = True
                inside = self._inside_layers()
                if self._move(inside) or self._move(inside | self._again):
                    self._useless.clear()
            else:
                return

    def _move(self, again: set[int]) -> bool:
        """Accepts `again` unless it raises the estimated peak; a step that changes nothing may
        enable one that lowers it. Returns whether it was accepted."""
        then = self._memory.estimate(again)
        if then.nbytes > self._now.nbytes:
            return False
        self._again, self._now = again, then
        return True

    def _best_step(self) -> tuple[int, set[int]] | None:
        """The idle storage that frees most bytes per second of recomputation, and the launches that
        make it."""
        memory, kept = self._memory, self._kept()
        idle = {
            s
            for s in self._now.movable
            if memory.nbytes[s] >= SMALLEST * self._now.nbytes and s not in self._useless
        }
        best, best_rate = None, 0.0
        for s in sorted(idle):
            chain = self._chain(s, kept)
            if chain is None:
                continue
            freed = sum(memory.nbytes[y] for n in chain for y in memory.makes[n] if y in idle)
            rate = freed / sum(self._seconds[n] for n in chain)
            if rate > best_rate:  # of equal ones the first made, whose backward comes last
                best, best_rate = (s, chain), rate
        return best

    def _kept(self) -> set[int]:
        """The storages that stay alive into the backward half: read there, and not recomputed."""
        memory = self._memory
        read = {s for n in self._again for s in memory.reads[n]} | memory.late
        return {s for s in read if memory.maker[s] not in self._again} | memory.fixed

    def _chain(self, storage: int, kept: set[int]) -> set[int] | None:
        """The launches that make a storage from values that are kept or recomputed anyway; None
        where one of them cannot run again."""
        memory = self._memory
        chain: set[int] = set()
        stack = [storage]
        while stack:
            maker = memory.maker[stack.pop()]
            if maker is None or maker in chain or maker in self._again:
                continue
            if not memory.repeatable[maker]:
                return None
            chain.add(maker)
            stack += [s for s in memory.reads[maker] if s not in kept]
        return chain

    def _inside_layers(self) -> set[int]:
        """The forward launches within layers, except those whose results another layer reads."""
        memory = self._memory
        layers = [layer(node) for node in memory.nodes]
        leaving = {
            maker
            for n, reads in enumerate(memory.reads)
            if not memory.backward[n]
            for s in reads
            if (maker := memory.maker[s]) is not None and layers[maker] != layers[n]
        }
        return {
            n for n, name in enumerate(layers) if name and memory.repeatable[n] and n not in leaving
        }

    def _prune(self) -> None:
        """Removes from the proposal launches that need not run again."""
        allowed = max(self._target, self._now.nbytes)
        floor = SLOWEST * sum(self._seconds[n] for n in self._again)
        for n in sorted(self._again, key=lambda n: -self._seconds[n]):
            if self._seconds[n] < floor:
                return
            then = self._memory.estimate(self._again - {n})
            if then.nbytes <= allowed:
                self._again, self._now = self._again - {n}, then


def layer(node: Node) -> str:
    """The path of a node's layer, such as `transformer.h.0`; "" outside of layers."""
    parts = where(node).split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])
