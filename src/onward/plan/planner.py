"""Bound graph -> Plan: select, order, storages, liveness, buffers and launches, places."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from onward.graph.graph import Graph, Node, Role, role_of, type_of
from onward.kernels import Kernel, Target
from onward.plan.launches import copy, launches_of
from onward.plan.liveness import Simulator
from onward.plan.order import order
from onward.plan.placement import Buffers, place_buffers, shown_state
from onward.plan.plan import Launch, Plan, Region, ResidualBlock
from onward.plan.select import select
from onward.plan.storages import Access, Storages
from onward.plan.views import Layout


def make_plan(
    graph: Graph,
    dims: dict[str, int],
    joint: bool = True,
    target: Target | None = None,
    block: ResidualBlock | None = None,
) -> Plan:
    """Plans a bound graph. `joint`: residual and scratch share one arena, which is right where no
    second forward can be outstanding (Trainer); of halves they are always two. `target`: this
    machine's CPU where left out. `block`: for a backward half, its forward half's residuals.
    Raises OnwardError where an op has no kernel.
    """
    graph = graph.clone()
    kernels = select(graph, target)
    return Planner(graph, dims, kernels, order(graph), joint, block).plan()


class Planner:
    """One plan in the making, for nodes that run in this order on these kernels."""

    def __init__(
        self,
        graph: Graph,
        dims: dict[str, int],
        kernels: dict[Node, Kernel],
        nodes: list[Node],
        joint: bool,
        block: ResidualBlock | None = None,
    ) -> None:
        self.graph, self.dims, self.nodes = graph, dims, nodes
        self.joint = joint and not graph.signature.residuals
        self.storages = Storages(graph, kernels, nodes, block)
        self.buffers = Buffers(self.storages, Simulator(self.storages).run(), len(nodes))

    def plan(self) -> Plan:
        """Writes the launches in order, then places the buffers that they use."""
        made = [(access.position, self.launches(access)) for access in self.storages.accesses]
        launches = [launch for _, found in made for launch in found]
        shown = self._shown_state()
        launches = [*(launch for launch, _ in shown.values()), *launches, *self._written_back()]
        residuals, copies = self._residuals()
        launches += copies
        outputs = {
            name: shown[name][1] if name in shown else self.buffers.layout(value)
            for name, value in self.graph.outputs.items()
            if name not in self.graph.state
        }
        outputs |= residuals
        sizes, bound = place_buffers(self.buffers.all, self.joint)
        self._number_launches([p for p, found in made for _ in found], len(shown), len(launches))
        names = set(self.graph.symbols)
        given = {
            v.name or "": self.buffers.layout(v)
            for v in self.graph.inputs
            if role_of(v) is not Role.SIZE
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
            self.buffers.flags,
            self.graph.signature.within(given, self.graph.outputs),
        )

    def launches(self, access: Access) -> list[Launch]:
        """What runs for one node."""
        return launches_of(access, self.storages, self.buffers)

    def _number_launches(self, positions: list[int], before: int, end: int) -> None:
        """Lifetimes in numbers of launches, where they were positions of nodes. positions: of the
        nodes that `before` launches precede; end: the number of all launches."""
        for buffer in self.buffers.all:
            kept, first = buffer.last >= len(self.nodes), buffer.first
            last = before + bisect_right(positions, buffer.last) - 1
            buffer.first = before + bisect_left(positions, first) if first else 0
            buffer.last = end if kept else max(buffer.first, last)

    def _shown_state(self) -> dict[str, tuple[Launch, Layout]]:
        """Copies of outputs that show state, first of all, last named first run."""
        found: dict[str, tuple[Launch, Layout]] = {}
        for name, value in shown_state(self.storages).items():
            kept = self.buffers.new(
                name,
                type_of(value),
                Region.SCRATCH,
                0,
                len(self.nodes),
                "output, before the update",
            )
            source, text = self.buffers.layout(value), f"{name} before the update"
            found[name] = copy(source, kept, text, "", False), kept
        return dict(reversed(found.items()))

    def _residuals(self) -> tuple[dict[str, Layout], list[Launch]]:
        """Where a forward half leaves its residuals; with copies of those that are not its own."""
        places: dict[str, Layout] = {}
        made: list[Launch] = []
        for name in self.graph.signature.residuals:
            if name in self.graph.outputs:
                places[name], source = self.buffers.keep(name, self.graph.outputs[name])
                if source is not None:
                    made.append(copy(source, places[name], f"save {name}", "", False))
        return places, made

    def _written_back(self) -> list[Launch]:
        """State outputs that no kernel wrote in place are copied to their inputs at the end."""
        made: list[Launch] = []
        for name, source in self.graph.state.items():
            here = self.buffers.layout(self.graph.outputs[name])
            there = self.buffers.layout(source)
            if here != there:
                made.append(copy(here, there, f"write back {name}", "optimizer", True))
        return made

    def _commit(self, launches: list[Launch]) -> int:
        """The first launch that writes to memory which outlives the step."""
        kept = {self.buffers.layout(source).buffer for source in self.graph.state.values()}
        writes = (i for i, x in enumerate(launches) if any(y.buffer in kept for y in x.outputs))
        return next(writes, len(launches))
