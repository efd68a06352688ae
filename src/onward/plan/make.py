"""Bound graph -> Plan, in five short passes: select, order, views, lifetimes, places."""

from __future__ import annotations

from dataclasses import replace

from onward.graph.graph import (
    Graph,
    Node,
    Role,
    Value,
    array_of,
    attributes,
    content_of,
    role_of,
    type_of,
    where,
)
from onward.graph.text import node_text
from onward.graph.types import Size, Type
from onward.kernels import KERNELS, Kernel, Need, Target
from onward.plan.arena import aligned, max_live, place
from onward.plan.order import order
from onward.plan.plan import Buffer, Launch, Plan, Region
from onward.plan.select import need_of, open_need, select
from onward.plan.views import VIEWS, Layout, contiguous, view
from onward.plan.wishes import wishes

_INPUT_REGION = {
    Role.PARAM: Region.USER,
    Role.BUFFER: Region.USER,
    Role.STATE: Region.PERSISTENT,
    Role.BATCH: Region.SCRATCH,  # staged anew for each call, so a new shape allocates nothing
    Role.RANDOM: Region.PERSISTENT,
    Role.HYPER: Region.PERSISTENT,
    Role.COTANGENT: Region.PERSISTENT,
}
_PURPOSE = {
    Role.PARAM: "parameter",
    Role.BUFFER: "module buffer",
    Role.STATE: "optimizer state",
    Role.BATCH: "staged batch",
    Role.RANDOM: "seed",
    Role.HYPER: "hyperparameter",
    Role.COTANGENT: "hyperparameter",
}


_COPY = Need("Contiguous", {}, (), ())


def make_plan(
    graph: Graph, dims: dict[str, int], joint: bool = True, target: Target | None = None
) -> Plan:
    """Plans a bound graph. `joint`: residual and scratch share one arena, which is right where no
    second forward can be outstanding (Trainer). `target`: this machine's CPU where left out.
    Raises OnwardError where an op has no kernel.
    """
    graph = graph.clone()
    kernels = select(graph, target)
    return _Planner(graph, dims, kernels, order(graph), joint).plan()


class _Planner:
    def __init__(
        self,
        graph: Graph,
        dims: dict[str, int],
        kernels: dict[Node, Kernel],
        nodes: list[Node],
        joint: bool,
    ) -> None:
        self.graph, self.dims, self.kernels, self.nodes = graph, dims, kernels, nodes
        self.joint = joint
        names = set(graph.symbols)
        self.open = frozenset(n for n in dims if n in names)
        self.buffers: list[Buffer] = []
        self.layouts: dict[Value, Layout] = {}
        self.launches: list[Launch] = []
        self.constants: dict[int, object] = {}
        self.last_read: dict[Value, int] = {}
        self.views: set[Node] = set()
        self.wishes = wishes(nodes, kernels, graph.output_values())
        self.shared: dict[Value, int] = {}  # owner of a wish -> its buffer
        self.sources = {graph.outputs[name]: source for name, source in graph.state.items()}

    def plan(self) -> Plan:
        self._find_views()
        self._lifetimes()
        self._owned_buffers()
        for position, node in enumerate(self.nodes):
            if node in self.views:
                self._view(node)
            elif node in self.wishes.placed:
                self._concat(node, position)
            else:
                self._launch(node, position)
        outputs = {
            name: self._before_update(name, v)
            for name, v in self.graph.outputs.items()
            if name not in self.graph.state
        }
        self._write_back()
        return self._place(outputs)

    # ---- views and lifetimes, in node positions

    def _find_views(self) -> None:
        """Layouts do not depend on where buffers lie, so what is a view is known first."""
        shapes: dict[Value, Layout] = {}
        for value in [*self.graph.inputs, *self.graph.ir.initializers.values()]:
            shapes[value] = contiguous(-1, type_of(value))
        for node in self.nodes:
            x = node.inputs[0] if node.inputs else None
            made = view(node, shapes[x]) if node.op_type in VIEWS and x is not None else None
            if made is not None:
                self.views.add(node)
            for i, value in enumerate(node.outputs):
                wish = self.wishes.of.get(value)
                if made is not None:
                    shapes[value] = made[i]
                else:
                    shapes[value] = wish.layout if wish else contiguous(-1, type_of(value))

    def _lifetimes(self) -> None:
        """The last position at which a value, or any view of it, is read."""
        end = len(self.nodes)
        for value in self.graph.outputs.values():
            if value not in self.sources:
                self.last_read[value] = end
        for value in self.sources:
            self.last_read[value] = end
        for position in range(end - 1, -1, -1):
            node = self.nodes[position]
            for i, x in enumerate(node.inputs):
                if x is None:
                    continue
                until = position
                if node in self.views and i == 0:
                    until = max(
                        [position, *(self.last_read.get(y, position) for y in node.outputs)]
                    )
                self.last_read[x] = max(self.last_read.get(x, -1), until)

    # ---- buffers

    def _buffer(
        self, name: str, type: Type, region: Region, first: int, last: int, purpose: str
    ) -> Layout:
        index = len(self.buffers)
        layout = contiguous(index, type)
        self.buffers.append(Buffer(index, name, layout.size, region, first, last, purpose))
        return layout

    def _owned_buffers(self) -> None:
        end = len(self.nodes)
        for value in self.graph.inputs:
            role = role_of(value)
            assert role is not None
            if role is Role.SIZE:
                layout = self._buffer(
                    value.name or "", type_of(value), Region.PERSISTENT, 0, end, "sizes"
                )
                self.layouts[value] = layout
                self.constants[layout.buffer] = content_of(value)
                continue
            self.layouts[value] = self._buffer(
                value.name or "", type_of(value), _INPUT_REGION[role], 0, end, _PURPOSE[role]
            )
        for value in self.graph.ir.initializers.values():
            layout = self._buffer(
                value.name or "", type_of(value), Region.PERSISTENT, 0, end, "constant"
            )
            self.layouts[value] = layout
            self.constants[layout.buffer] = array_of(value)

    def _view(self, node: Node) -> None:
        x = node.inputs[0]
        assert x is not None
        made = view(node, self.layouts[x])
        assert made is not None
        for value, layout in zip(node.outputs, made, strict=True):
            self.layouts[value] = layout

    def _wished(self, value: Value, node: Node, position: int) -> Layout:
        """The window that `value` wishes for; its owner's memory is taken at the first writer."""
        owner, layout = self.wishes.of[value].owner, self.wishes.of[value].layout
        if owner not in self.shared:
            last = max(position, self.last_read.get(owner, position))
            made = self._buffer(
                owner.name or "", type_of(owner), Region.SCRATCH, position, last, node.op_type
            )
            self.shared[owner] = made.buffer
        buffer = self.buffers[self.shared[owner]]
        buffer.last = max(buffer.last, self.last_read.get(value, position))
        self._settle_region(buffer, node)
        return replace(layout, buffer=buffer.index)

    def _concat(self, node: Node, position: int) -> None:
        """A Concat of which some inputs lie in their place already; the others are copied there."""
        whole = self._wished(node.outputs[0], node, position)
        dim = attributes(node)["axis"] % len(whole.shape)
        start: Size = 0
        for i, x in enumerate(node.inputs):
            assert x is not None
            layout = self.layouts[x]
            if i not in self.wishes.placed[node]:
                offset = whole.offset + start * whole.strides[dim]
                target = replace(whole, shape=layout.shape, offset=offset)
                self._copy(node, layout, target, f"%{x.name} into its place in the Concat")
            start = start + layout.shape[dim]
        self.layouts[node.outputs[0]] = whole

    def _copy(self, node: Node, source: Layout, target: Layout, text: str) -> None:
        self.launches.append(
            Launch(
                KERNELS["Contiguous"][0], "Contiguous", where(node), {}, (source,), (target,), (),
                0, bool(node.meta.get("backward")), text, _COPY,
            )
        )  # fmt: skip

    # ---- launches

    def _launch(self, node: Node, position: int) -> None:
        kernel = self.kernels[node]
        inputs = [
            None if v is None else self._readable(node, kernel, i, v, position)
            for i, v in enumerate(node.inputs)
        ]
        outputs: list[Layout] = []
        for i, value in enumerate(node.outputs):
            # noted at once: the next output must not take the same memory
            self.layouts[value] = self._writable(node, kernel, i, position)
            outputs.append(self.layouts[value])
        need = need_of(node)
        scratch = tuple(
            self._buffer(
                f"{node.name}.scratch", t, Region.SCRATCH, position, position, "kernel scratch"
            )
            for t in kernel.scratch(need)
        )
        self.launches.append(
            Launch(
                kernel, node.op_type, where(node), need.attrs, tuple(inputs), tuple(outputs),
                scratch, kernel.workspace(need), bool(node.meta.get("backward")), node_text(node),
                open_need(node),
            )
        )  # fmt: skip

    def _readable(self, node: Node, kernel: Kernel, i: int, value: Value, position: int) -> Layout:
        """The input's layout, copied to a contiguous one where the kernel asks for it."""
        layout = self.layouts[value]
        strict = kernel.contiguous is None or i in kernel.contiguous
        if layout.is_contiguous or not strict:
            return layout
        copy = self._buffer(
            f"{value.name}.contiguous", type_of(value), Region.SCRATCH, position, position,
            f"contiguous copy for {node.op_type}",
        )  # fmt: skip
        self._copy(node, layout, copy, f"contiguous copy of %{value.name}")
        return copy

    def _writable(self, node: Node, kernel: Kernel, i: int, position: int) -> Layout:
        """Where output `i` goes: the state it replaces, a dying input's memory, or a new buffer."""
        value = node.outputs[i]
        rights = [j for out, j in kernel.inplace if out == i and j < len(node.inputs)]
        source = self.sources.get(value)
        for j in rights:
            if source is None or node.inputs[j] is not source:
                continue
            if self.last_read[source] <= position and self._alone(node, source, rights):
                return self.layouts[source]
        if value in self.wishes.of:
            return self._wished(value, node, position)
        for j in rights:
            x = node.inputs[j]
            if x is not None and self._dies_here(node, x, value, position, rights):
                layout = self.layouts[x]
                buffer = self.buffers[layout.buffer]
                buffer.last = max(position, self.last_read.get(value, position))
                buffer.name = (
                    f"{buffer.name} > {value.name}" if len(buffer.name) < 24 else buffer.name
                )
                self._settle_region(buffer, node)
                return layout
        last = max(position, self.last_read.get(value, position))
        layout = self._buffer(
            value.name or "", type_of(value), Region.SCRATCH, position, last, f"{node.op_type}"
        )
        self._settle_region(self.buffers[layout.buffer], node)
        return layout

    def _dies_here(
        self, node: Node, x: Value, value: Value, position: int, rights: list[int]
    ) -> bool:
        """Whether x's whole buffer is free to be overwritten by `value` at this launch.

        rights: inputs that the kernel may overwrite.
        """
        layout = self.layouts[x]
        buffer = self.buffers[layout.buffer]
        return (
            buffer.region in (Region.SCRATCH, Region.RESIDUAL)
            and buffer.last <= position
            and type_of(x) == type_of(value)
            and layout.is_contiguous
            and layout.size == buffer.size
            and self._alone(node, x, rights)
            and not any(
                o in self.layouts and self.layouts[o].buffer == layout.buffer for o in node.outputs
            )
        )

    def _alone(self, node: Node, x: Value, rights: list[int]) -> bool:
        """Whether the node reads x's memory only where its kernel may overwrite what it reads: not
        where a product's addend is its operand too, or an update's gradient shows the parameter."""
        buffer = self.layouts[x].buffer
        return all(
            v is None or self.layouts[v].buffer != buffer or (v is x and i in rights)
            for i, v in enumerate(node.inputs)
        )

    def _settle_region(self, buffer: Buffer, node: Node) -> None:
        """Residual: written before the backward half begins, read in it."""
        if node.meta.get("backward"):
            return
        if buffer.last < len(self.nodes) and self.nodes[buffer.last].meta.get("backward"):
            buffer.region = Region.RESIDUAL
            buffer.purpose = f"{node.op_type}, kept for backward"

    def _before_update(self, name: str, value: Value) -> Layout:
        """Where an output lies: one that shows state is copied, first of all, for the state is
        overwritten before the output is read."""
        shown, maker = value, value.producer()
        while maker in self.views and maker.inputs[0] is not None:
            shown = maker.inputs[0]
            maker = shown.producer()
        layout = self.layouts[value]
        if shown not in self.graph.state.values():
            return layout
        kept = self._buffer(
            name, type_of(value), Region.SCRATCH, 0, len(self.nodes), "output, before the update"
        )
        launch = Launch(
            KERNELS["Contiguous"][0], "Contiguous", "", {}, (layout,), (kept,), (), 0, False,
            f"{name} before the update", _COPY,
        )  # fmt: skip
        self.launches.insert(0, launch)
        return kept

    def _write_back(self) -> None:
        """State outputs that no kernel wrote in place are copied to their inputs at the end."""
        for name, source in self.graph.state.items():
            value = self.graph.outputs[name]
            here, there = self.layouts[value], self.layouts[source]
            if here == there:
                continue
            self.launches.append(
                Launch(
                    KERNELS["Contiguous"][0], "Contiguous", "optimizer", {}, (here,), (there,),
                    (), 0, True, f"write back {name}", _COPY,
                )
            )  # fmt: skip

    # ---- places

    def _place(self, outputs: dict[str, Layout]) -> Plan:
        sizes: dict[Region, int] = {r: 0 for r in Region if r is not Region.USER}
        for buffer in self.buffers:
            if buffer.region is Region.PERSISTENT:
                buffer.offset = sizes[Region.PERSISTENT]
                sizes[Region.PERSISTENT] += aligned(buffer.nbytes)
        both = [b for b in self.buffers if b.region in (Region.RESIDUAL, Region.SCRATCH)]
        groups = [both] if self.joint else [
            [b for b in both if b.region is r] for r in (Region.RESIDUAL, Region.SCRATCH)
        ]  # fmt: skip
        for group, region in zip(groups, (Region.SCRATCH,) if self.joint else
                                 (Region.RESIDUAL, Region.SCRATCH), strict=True):  # fmt: skip
            offsets, sizes[region] = place(
                [b.nbytes for b in group], [(b.first, b.last) for b in group]
            )
            for buffer, offset in zip(group, offsets, strict=True):
                buffer.offset = offset
        bound = max_live([b.nbytes for b in both], [(b.first, b.last) for b in both])
        workspace = max((launch.workspace for launch in self.launches), default=0)
        given = {v.name or "": self.layouts[v] for v in self.graph.inputs
                 if role_of(v) is not Role.SIZE}  # fmt: skip
        signature = self.graph.signature.within(given, self.graph.outputs)
        return Plan(
            self.dims, self.open, self.launches, self.buffers,
            given, outputs, self.constants, sizes, bound, workspace, self.joint, self._commit(),
            signature,
        )  # fmt: skip

    def _commit(self) -> int:
        """The first launch that writes to memory which outlives the step."""
        kept = {self.layouts[source].buffer for source in self.sources.values()}
        writes = (
            i for i, x in enumerate(self.launches) if any(y.buffer in kept for y in x.outputs)
        )
        return next(writes, len(self.launches))
