"""Storages: the memory that values lie in, and what each launch reads, makes and may overwrite.

A storage is the memory of one value and of all windows on it: views, and values with an assigned
layout there. Nothing here depends on when a launch runs (`plan/liveness.py`) or on where a storage
is placed (`plan/placement.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onward.graph.graph import Graph, Node, Value, type_of
from onward.graph.ops.collective import STARTS, WAIT, wait_of
from onward.graph.types import Size, Type, value
from onward.kernels import Kernel, KernelSpec
from onward.plan.arena import aligned
from onward.plan.order import updates_in_place
from onward.plan.output_layout import assign_output_layouts
from onward.plan.select import spec_of
from onward.plan.views import VIEWS, Layout, contiguous, view


@dataclass(frozen=True)
class Access:
    """The storages, by number, that one node reads and writes.

    position: the node's, counting views. reads: each once. makes: those that it is the first to
    write. over: for each of `makes`, the input storages that it may reuse if the node is their last
    reader, best first. copies: numbers of inputs to be copied, since the kernel needs them
    contiguous. scratch: the kernel's temporaries. transient: bytes of both. spec: None where the
    node has no kernel of its own, as a Concat whose inputs are written in place.
    """

    node: Node
    position: int
    reads: tuple[int, ...]
    makes: tuple[int, ...] = ()
    over: tuple[tuple[int, ...], ...] = ()
    copies: tuple[int, ...] = ()
    scratch: tuple[Type, ...] = ()
    transient: int = 0
    spec: KernelSpec | None = None

    @property
    def is_backward(self) -> bool:
        return bool(self.node.meta.get("backward"))


class Storages:
    """The storages of a graph whose nodes run in this order, and each node's access to them.

    kernels: of the nodes that need a launch. layouts: of each value, with the number of its storage
    as buffer. Lists by storage: of, the value whose whole memory it is; sizes, bytes with open
    sizes as symbols; nbytes, these at the sizes planned for, aligned; maker, the access that makes
    it, None for inputs and constants; windows, nodes that only show it. kept: storages of the
    graph's outputs, which live to the end. shared: those that several launches write. state:
    storage -> the state's storage, where an update writes in place. arrived: result of a
    collective's wait -> result of its start, in whose memory it lies. accesses: in order; most
    views have none. If the graph runs in two halves of which the first has `half` nodes: kept are
    only the gradients; shown are the other outputs, which the forward half leaves; the attribute
    half counts its accesses.
    """

    def __init__(
        self,
        graph: Graph,
        kernels: Mapping[Node, Kernel],
        nodes: Sequence[Node],
        half: int = 0,
    ) -> None:
        self.graph, self.kernels = graph, kernels
        self.layouts: dict[Value, Layout] = {}
        self.of: list[Value] = []
        self.sizes: list[Size] = []
        self.nbytes: list[int] = []
        self.maker: list[int | None] = []
        self.windows: list[list[Node]] = []
        self.accesses: list[Access] = []
        self.shared: set[int] = set()
        self.state: dict[int, int] = {}
        self.arrived: dict[Value, Value] = {}
        self.views: set[Node] = set()
        self.half = 0
        self._outputs = graph.output_values()
        self.assigned = assign_output_layouts(nodes, kernels, self._outputs)
        self._owners: dict[Value, int] = {}  # the storage of each owner of assigned layouts
        self._sources = {graph.outputs[name]: source for name, source in graph.state.items()}
        self._in_place = updates_in_place(graph)
        # storage -> storage of the state that its kernel can overwrite
        self._updates: dict[int, int] = {}
        for given in [*graph.inputs, *graph.ir.initializers.values()]:
            self._whole(given, None)
        for position, node in enumerate(nodes):
            if not self._view(node, position):
                if node in self.assigned.placed:
                    self._concat(node, position)
                elif node.op_type == WAIT:
                    self._wait(node, position)
                else:
                    self._launch(node, position)
        kept = set(graph.outputs)
        if graph.signature.split_halves:
            kept = set(graph.signature.gradients.values())
            self.half = sum(access.position < half for access in self.accesses)
        self.kept = {self.layouts[graph.outputs[name]].buffer for name in kept}
        self.shown = {self.layouts[v].buffer for v in graph.outputs.values()} - self.kept
        self._write_state_in_place()

    def _storage(self, owner: Value, maker: int | None) -> int:
        size = contiguous(-1, type_of(owner)).size
        self.of.append(owner)
        self.sizes.append(size)
        self.nbytes.append(aligned(value(size)))
        self.maker.append(maker)
        self.windows.append([])
        return len(self.of) - 1

    def _whole(self, owner: Value, maker: int | None) -> int:
        """Makes a storage for a value of its own."""
        made = self._storage(owner, maker)
        self.layouts[owner] = contiguous(made, type_of(owner))
        return made

    def _at(self, read: Sequence[Value | None]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.layouts[v].buffer for v in read if v is not None))

    # ---- what each node does

    def _view(self, node: Node, position: int) -> bool:
        """Records a node that is a view of its first input; returns whether it is one. A view reads
        only its other inputs, which say what to show; one without readers counts as a reader."""
        x = node.inputs[0] if node.inputs else None
        made = view(node, self.layouts[x]) if node.op_type in VIEWS and x is not None else None
        if made is None:
            return False
        self.views.add(node)
        self.layouts.update(zip(node.outputs, made, strict=True))
        self.windows[made[0].buffer].append(node)
        dead = not any(y in self._outputs or y.uses() for y in node.outputs)
        reads = self._at(node.inputs if dead else node.inputs[1:])
        if any(self.maker[s] is not None for s in reads):
            self.accesses.append(Access(node, position, reads))
        return True

    def _window(self, shown: Value, made: list[int]) -> Layout:
        """The layout assigned to a value. The first value written makes the storage of their common
        owner."""
        assigned = self.assigned.of[shown]
        if assigned.owner not in self._owners:
            self._owners[assigned.owner] = self._storage(assigned.owner, len(self.accesses))
            made.append(self._owners[assigned.owner])
        return replace(assigned.layout, buffer=self._owners[assigned.owner])

    def _concat(self, node: Node, position: int) -> None:
        """Records a Concat: inputs already in place need nothing, the others are copied there."""
        made: list[int] = []
        whole = self.layouts[node.outputs[0]] = self._window(node.outputs[0], made)
        self.shared.add(whole.buffer)
        self.windows[whole.buffer].append(node)
        reads = self._at(node.inputs)
        self.accesses.append(Access(node, position, reads, tuple(made), tuple(() for _ in made)))

    def _wait(self, node: Node, position: int) -> None:
        """Records the wait of a collective, whose results lie where its start has written them."""
        for result, started in zip(node.outputs, node.inputs, strict=False):
            assert started is not None, "a wait reads the results of its start first"
            self.arrived[result] = started
            self.layouts[result] = self.layouts[started]
            self.shared.add(self.layouts[started].buffer)
        reads = self._at(node.inputs)
        self.accesses.append(Access(node, position, reads, spec=spec_of(node)))

    def _launch(self, node: Node, position: int) -> None:
        kernel, spec = self.kernels[node], spec_of(node)
        copies = tuple(
            i
            for i, x in enumerate(node.inputs)
            if x is not None
            and not self.layouts[x].is_contiguous
            and (kernel.contiguous is None or i in kernel.contiguous)
        )
        copied = [type_of(x) for i in copies if (x := node.inputs[i]) is not None]
        scratch = tuple(kernel.scratch(spec))
        made: list[int] = []
        over: list[tuple[int, ...]] = []
        for out, result in enumerate(node.outputs):
            rights = [j for o, j in kernel.inplace if o == out and j < len(node.inputs)]
            if result in self.assigned.of:
                self.layouts[result] = self._window(result, made)
                over += [()] * (len(made) - len(over))
                continue
            candidates = tuple(
                self.layouts[x].buffer
                for j in rights
                if (x := node.inputs[j]) is not None and self._replaceable(node, x, result, rights)
            )
            made.append(self._whole(result, len(self.accesses)))
            over.append(candidates)
            following = result if node.op_type not in STARTS else wait_of(node).outputs[out]
            source = self._sources.get(following, following)
            updated = self._in_place.get(node, ())
            at = [node.inputs[j] for j in rights]
            if source in updated and source in at and self._alone(node, source, rights):
                self._updates[made[-1]] = self.layouts[source].buffer
        self.accesses.append(
            Access(
                node, position, self._at(node.inputs), tuple(made), tuple(over), copies, scratch,
                sum(aligned(t.nbytes) for t in (*copied, *scratch)), spec,
            )
        )  # fmt: skip

    # ---- what may be overwritten

    def _replaceable(self, node: Node, x: Value, result: Value, rights: Sequence[int]) -> bool:
        """Whether `result` may reuse x's memory if the node is its last reader: x has a storage of
        its own, made by a launch. rights: inputs that the kernel may overwrite."""
        layout = self.layouts[x]
        written = (self.layouts[y].buffer for y in node.outputs if y in self.layouts)
        return (
            self.maker[layout.buffer] is not None
            and type_of(x) == type_of(result)
            and layout.is_contiguous
            and layout.size == self.sizes[layout.buffer]
            and self._alone(node, x, rights)
            and layout.buffer not in written
        )

    def _alone(self, node: Node, x: Value, rights: Sequence[int]) -> bool:
        """Whether the node reads x's memory only through inputs that its kernel may overwrite. It
        does not if a product's addend is also its operand, or if an update's gradient is a view of
        the parameter."""
        storage = self.layouts[x].buffer
        return all(
            v is None or self.layouts[v].buffer != storage or (v is x and i in rights)
            for i, v in enumerate(node.inputs)
        )

    def _write_state_in_place(self) -> None:
        """Makes updates overwrite the state itself where nothing reads the old state later."""
        last = {s: i for i, access in enumerate(self.accesses) for s in access.reads}
        for made, source in self._updates.items():
            maker = self.maker[made]
            assert maker is not None
            if last[source] <= maker and source not in self.kept:
                self.state[made] = source
                self.nbytes[made] = 0
                access = self.accesses[maker]
                pairs = [p for p in zip(access.makes, access.over, strict=True) if p[0] != made]
                self.accesses[maker] = replace(
                    access, makes=tuple(s for s, _ in pairs), over=tuple(o for _, o in pairs)
                )
