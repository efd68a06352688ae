"""Specialized graph -> Plan: select, order, storages, liveness, buffers and launches, offsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from onward.graph.graph import Graph, Node, Role, Value, role_of, type_of
from onward.graph.ops.collective import STARTS
from onward.kernels import Kernel, Target
from onward.plan.launches import copy, launches_of
from onward.plan.liveness import Simulator
from onward.plan.offloaded import resident_bytes
from onward.plan.order import forward_half, order
from onward.plan.placement import Buffers, place_buffers, shown_state
from onward.plan.plan import MemoryRegion, Plan, PlannedLaunch
from onward.plan.select import select
from onward.plan.storages import Access, Storages
from onward.plan.views import Layout


def make_plan(
    graph: Graph,
    dims: dict[str, int],
    joint: bool = True,
    target: Target | None = None,
) -> Plan:
    """Plans a specialized graph. joint: residual and scratch memory share one arena. target: by
    default this machine's CPU. Raises OnwardError where an op has no kernel."""
    graph = graph.clone()
    kernels = select(graph, target)
    return Planner(graph, dims, kernels, order(graph), joint).plan()


class Planner:
    """Builds one plan, for nodes in this order with these kernels."""

    def __init__(
        self,
        graph: Graph,
        dims: dict[str, int],
        kernels: dict[Node, Kernel],
        nodes: list[Node],
        joint: bool,
    ) -> None:
        self.graph, self.dims, self.nodes, self.joint = graph, dims, nodes, joint
        # number of nodes in the forward half; None where there are no halves
        self.half: int | None = None
        if graph.signature.split_halves:
            self.half = len(forward_half(graph))
        self.storages = Storages(graph, kernels, nodes, self.half or 0)
        lives = Simulator(self.storages).run()
        self.buffers = Buffers(self.storages, lives, len(nodes), self.half or 0)

    def plan(self) -> Plan:
        """Makes the launches in order, then places their buffers."""
        made = [(access.position, self.launches(access)) for access in self.storages.accesses]
        shown = self._shown_state()
        before = [launch for launch, _ in shown.values()]
        at = len(self.nodes) if self.half is None else self.half
        placed = [(position, x) for position, found in made for x in found if position < at]
        outputs = {
            name: shown[name][1] if name in shown else self.buffers.layout(value)
            for name, value in self.graph.outputs.items()
            if name not in self.graph.state
        }
        placed += [(at, x) for x in (*self._left_gradients(outputs), *self._written_back(shown))]
        cuts = () if self.half is None else (len(before) + len(placed),)
        placed += [(position, x) for position, found in made for x in found if position >= at]
        launches = [*before, *(launch for _, launch in placed)]
        sizes, bound = place_buffers(self.buffers.all, self.joint)
        self._number_launches([p for p, _ in placed], len(shown), len(launches))
        names = set(self.graph.symbols)
        given = {
            v.name or "": self.buffers.layout(v)
            for v in self.graph.inputs
            if role_of(v) is not Role.SIZE and not self._is_unread(v)
        }
        return Plan(
            self.dims,
            frozenset(n for n in self.dims if n in names),
            launches,
            self.buffers.all,
            given,
            outputs,
            self.buffers.constants,
            sizes,
            bound,
            max((launch.workspace for launch in launches), default=0),
            self.joint,
            self._commit(launches),
            cuts,
            self.buffers.flags,
            self.graph.signature.within(given, self.graph.outputs),
            resident_bytes(launches, self.buffers.all),
        )

    def launches(self, access: Access) -> list[PlannedLaunch]:
        """Makes the launches of one node."""
        return launches_of(access, self.storages, self.buffers)

    def _number_launches(self, positions: list[int], before: int, end: int) -> None:
        """Converts lifetimes of buffers from positions of nodes to numbers of launches. positions:
        of the node of each launch, after the first `before` launches. end: the number of
        launches."""
        for buffer in self.buffers.all:
            kept, first = buffer.last >= len(self.nodes), buffer.first
            last = before + bisect_right(positions, buffer.last) - 1
            buffer.first = before + bisect_left(positions, first) if first else 0
            buffer.last = end if kept else max(buffer.first, last)

    def _shown_state(self) -> dict[str, tuple[PlannedLaunch, Layout]]:
        """Copies, before all other launches, of outputs whose memory is state that the step
        overwrites, and of next states that lie in other state. The order is reversed: the
        output named last is copied first."""
        found: dict[str, tuple[PlannedLaunch, Layout]] = {}
        for name, value in shown_state(self.storages).items():
            kept = self.buffers.new(
                name,
                type_of(value),
                MemoryRegion.SCRATCH,
                0,
                len(self.nodes),
                "output, before the update",
            )
            source, text = self.buffers.layout(value), f"{name} before the update"
            found[name] = copy(source, kept, text, "", False), kept
        return dict(reversed(found.items()))

    def _is_unread(self, value: Value) -> bool:
        """Whether an input is a parameter that no launch reads or writes, as in a graph of row
        numbers. One that another rank updates is written alone."""
        unread = role_of(value) is Role.PARAM and not value.uses()
        kept = {*self.graph.output_values(), *self.graph.state.values()}
        return unread and value not in kept

    def _left_gradients(self, outputs: dict[str, Layout]) -> list[PlannedLaunch]:
        """Gives each gradient that the step leaves memory that no other value shares, since its
        reader may write to it. Changes `outputs`; returns the copies, at the end, of those that are
        views, inputs or constants, or the memory of another output."""
        made: list[PlannedLaunch] = []
        left = [n for n in self.graph.signature.left_gradients.values() if n in outputs]
        taken = {layout.buffer for name, layout in outputs.items() if name not in left}
        taken |= {self.buffers.layout(self.graph.outputs[n]).buffer for n in self.graph.state}
        for name in left:
            here, value = outputs[name], self.graph.outputs[name]
            whole = here.is_contiguous and here.size == self.buffers.all[here.buffer].size
            given = self.storages.maker[self.storages.layouts[value].buffer] is None
            if given or not whole or here.buffer in taken:
                end = len(self.nodes)
                there = self.buffers.new(name, type_of(value), MemoryRegion.SCRATCH, end, end, "")
                made.append(copy(here, there, f"{name} in memory of its own", "optimizer", True))
                here = outputs[name] = there
            taken.add(here.buffer)
            buffer = self.buffers.all[here.buffer]
            buffer.name, buffer.purpose = name, "gradient, for the optimizer's own step"
        return made

    def _written_back(
        self, shown: Mapping[str, tuple[PlannedLaunch, Layout]]
    ) -> list[PlannedLaunch]:
        """Copies of next states that no kernel wrote in place, to run at the end, or at the end of
        the forward half if there are halves. shown: the copies of those that lie in other state."""
        made: list[PlannedLaunch] = []
        for name, source in self.graph.state.items():
            own = self.buffers.layout(self.graph.outputs[name])
            here = shown[name][1] if name in shown else own
            there = self.buffers.layout(source)
            if here != there:
                made.append(copy(here, there, f"write back {name}", "optimizer", True))
        return made

    def _commit(self, launches: list[PlannedLaunch]) -> int:
        """The first launch that writes to memory which outlives the step, or that exchanges what
        an update on another rank writes."""
        kept = {self.buffers.layout(source).buffer for source in self.graph.state.values()}

        def commits(launch: PlannedLaunch) -> bool:
            shared = launch.op in STARTS and bool(launch.attrs.get("update"))
            return shared or any(y.buffer in kept for y in launch.outputs)

        return next((i for i, x in enumerate(launches) if commits(x)), len(launches))
