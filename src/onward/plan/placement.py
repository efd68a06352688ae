"""Placement: a buffer in some region for each storage, and an offset for each buffer."""

from __future__ import annotations

from dataclasses import replace

from onward.graph.graph import Node, Role, Value, array_of, content_of, role_of, type_of
from onward.graph.types import Type
from onward.kernels.kernel import FLAG
from onward.plan.arena import aligned, max_live, place
from onward.plan.liveness import Liveness
from onward.plan.plan import Buffer, MemoryRegion
from onward.plan.storages import Access, Storages
from onward.plan.views import Layout, contiguous, view

_INPUT_REGION = {
    Role.PARAM: MemoryRegion.USER,
    Role.BUFFER: MemoryRegion.USER,
    Role.STATE: MemoryRegion.PERSISTENT,
    Role.BATCH: MemoryRegion.SCRATCH,  # staged for each call, so that a new shape allocates nothing
    Role.RANDOM: MemoryRegion.PERSISTENT,
    Role.HYPER: MemoryRegion.PERSISTENT,
    Role.COTANGENT: MemoryRegion.PERSISTENT,
    Role.SIZE: MemoryRegion.PERSISTENT,
}
_PURPOSE = {
    Role.PARAM: "parameter",
    Role.BUFFER: "module buffer",
    Role.STATE: "optimizer state",
    Role.BATCH: "staged batch",
    Role.RANDOM: "seed",
    Role.HYPER: "hyperparameter",
    Role.COTANGENT: "cotangent",
    Role.SIZE: "sizes",
}
_ARENAS = (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH)
_LONGEST_NAME = 24  # characters of a buffer's name beyond which no further value's name is appended


class Buffers:
    """The buffers of a plan, in the order of their first writes.

    lives: of the storages, without recomputation. all: by index. constants: content by index.
    flags: i64[n,2], for the launches whose kernels detect bad input; None where there are none.
    """

    def __init__(self, storages: Storages, lives: Liveness, end: int, half: int = 0) -> None:
        self.all: list[Buffer] = []
        self.constants: dict[int, object] = {}
        self._storages, self._lives, self._end = storages, lives, end
        self._of: dict[int, int] = {}  # storage -> its buffer
        self._layouts: dict[Value, Layout] = {}
        self._known: dict[Layout, Layout] = {}  # equal layouts are one object, bound once
        self._backward = {a.position for a in storages.accesses if a.is_backward}
        signature = storages.graph.signature
        away = set(signature.slots.values()) if signature.offloaded else set[str]()
        for value in storages.graph.inputs:
            role = role_of(value)
            assert role is not None
            first = half if role is Role.COTANGENT else 0
            region = MemoryRegion.OFFLOADED if value.name in away else _region(value)
            index = self._given(value, region, _PURPOSE[role], first)
            if role is Role.SIZE:
                self.constants[index] = content_of(value)
        for value in storages.graph.ir.initializers.values():
            index = self._given(value, MemoryRegion.PERSISTENT, "constant")
            self.constants[index] = array_of(value)
        self.flags = self._flags()
        self._flagged = 0  # launches that have got a flag

    def _flags(self) -> Layout | None:
        """Makes one buffer for the flags of all launches, so that the host reads them at once."""
        kernels = (self._storages.kernels[a.node] for a in self._storages.accesses if a.spec)
        count = sum(kernel.input_error is not None for kernel in kernels)
        if not count:
            return None
        type = FLAG.with_shape((count, *FLAG.shape))
        return self.new("error flags", type, MemoryRegion.PERSISTENT, 0, self._end, "error flags")

    def flag(self) -> Layout:
        """The flag of the next launch."""
        assert self.flags is not None
        flag = replace(contiguous(self.flags.buffer, FLAG), offset=self._flagged * FLAG.numel)
        self._flagged += 1
        return flag

    def new(
        self, name: str, type: Type, region: MemoryRegion, first: int, last: int, purpose: str
    ) -> Layout:
        """Makes a contiguous buffer. first, last: positions of nodes, both included."""
        index = len(self.all)
        layout = contiguous(index, type)
        self.all.append(Buffer(index, name, layout.size, region, first, last, purpose))
        return layout

    def temporary(self, name: str, type: Type, access: Access, purpose: str) -> Layout:
        """Makes a buffer that lives during one launch."""
        return self.new(name, type, MemoryRegion.SCRATCH, access.position, access.position, purpose)

    def layout(self, value: Value) -> Layout:
        """The layout of a value; equal layouts are one object."""
        found = self._layouts.get(value)
        if found is None and value in self._storages.arrived:
            found = self._layouts[value] = self.layout(self._storages.arrived[value])
        if found is None:
            maker = value.producer()
            if maker in self._storages.views and maker.inputs[0] is not None:
                windows = view(maker, self.layout(maker.inputs[0]))
                assert windows is not None
                self._layouts.update(zip(maker.outputs, map(self._one, windows), strict=True))
                return self._layouts[value]
            window = self._storages.layouts[value]
            found = self._layouts[value] = self._one(
                replace(window, buffer=self._of[window.buffer])
            )
        return found

    def _one(self, layout: Layout) -> Layout:
        return self._known.setdefault(layout, layout)

    def _given(self, value: Value, region: MemoryRegion, purpose: str, first: int = 0) -> int:
        layout = self.new(value.name or "", type_of(value), region, first, self._end, purpose)
        self._of[self._storages.layouts[value].buffer] = layout.buffer
        return layout.buffer

    def write(self, access: Access, value: Value) -> Layout:
        """Chooses where a launch writes an output: in the state that it replaces, in memory that it
        reuses, where a collective that it waits for has written it, in a window of a buffer that
        several launches write, or in a buffer of its own."""
        storages = self._storages
        storage = storages.layouts[value].buffer
        if value in storages.arrived:
            return self.layout(value)
        if storage in storages.state:
            self._of[storage] = self._of[storages.state[storage]]
            return self.layout(value)
        last = self._last(storage)
        if storage in self._lives.over:
            before = self._lives.over[storage]
            index = self._of[storage] = self._of[before]
            self._layouts[value] = self._replaced(access.node, before)
            buffer = self.all[index]
            buffer.last = last
            if len(buffer.name) < _LONGEST_NAME:
                buffer.name = f"{buffer.name} > {value.name}"
        elif storage not in self._of:
            owner, op = storages.of[storage], access.node.op_type
            made = self.new(
                owner.name or "", type_of(owner), MemoryRegion.SCRATCH, access.position, last, op
            )
            self._of[storage] = made.buffer
        self._settle_region(self.all[self._of[storage]], access.node)
        return self.layout(value)

    def _replaced(self, node: Node, storage: int) -> Layout:
        """The layout of the input that is this storage. The output gets exactly its strides, even
        for dims of size 1: torch refuses to overwrite an input of other strides."""
        layouts = self._storages.layouts
        read = (x for x in node.inputs if x is not None and layouts[x].buffer == storage)
        return self.layout(next(read))

    def _last(self, storage: int) -> int:
        """The position at which a storage is last read."""
        place = int(self._lives.last[storage])
        return self._end if place == self._lives.end else self._storages.accesses[place].position

    def _settle_region(self, buffer: Buffer, node: Node) -> None:
        """Makes a buffer residual if it is written before the backward half and read in it."""
        if not node.meta.get("backward") and buffer.last in self._backward:
            buffer.region = MemoryRegion.RESIDUAL
            buffer.purpose = f"{node.op_type}, kept for backward"


def place_buffers(buffers: list[Buffer], joint: bool) -> tuple[dict[MemoryRegion, int], int]:
    """Sets the offset of each buffer. Returns the bytes of each region, and the most bytes of
    residual and scratch memory alive at one launch. joint: both share the scratch arena."""
    sizes: dict[MemoryRegion, int] = {r: 0 for r in MemoryRegion if r is not MemoryRegion.USER}
    for buffer in buffers:
        if buffer.region in (MemoryRegion.PERSISTENT, MemoryRegion.OFFLOADED):
            buffer.offset = sizes[buffer.region]
            sizes[buffer.region] += aligned(buffer.nbytes)
    both = [b for b in buffers if b.region in _ARENAS]
    groups = {MemoryRegion.SCRATCH: both}
    if not joint:
        groups = {region: [b for b in both if b.region is region] for region in _ARENAS}
    for region, group in groups.items():
        offsets, sizes[region] = place(
            [b.nbytes for b in group], [(b.first, b.last) for b in group]
        )
        for buffer, offset in zip(group, offsets, strict=True):
            buffer.offset = offset
    return sizes, max_live([b.nbytes for b in both], [(b.first, b.last) for b in both])


def shown_state(storages: Storages) -> dict[str, Value]:
    """The outputs, by name, whose memory is state that is overwritten before they are read. Among
    them is the next value of a state that another one had, as where two buffers are exchanged."""
    graph, found = storages.graph, dict[str, Value]()
    states = {*graph.state.values()}
    for name, value in graph.outputs.items():
        unchanged = value is graph.state.get(name)
        if not unchanged and _shown(value, storages.views) in states:
            found[name] = value
    return found


def _shown(value: Value, views: set[Node]) -> Value:
    """The value whose memory a view shows."""
    maker = value.producer()
    while maker in views and maker.inputs[0] is not None:
        value = maker.inputs[0]
        maker = value.producer()
    return value


def arena_bytes_throughout(storages: Storages) -> int:
    """Bytes of the arenas in use from a step's first launch to its last: the staged batch, and
    copies of outputs that show state."""
    staged = [v for v in storages.graph.inputs if _region(v) in _ARENAS]
    return sum(aligned(type_of(v).nbytes) for v in [*staged, *shown_state(storages).values()])


def _region(value: Value) -> MemoryRegion:
    role = role_of(value)
    assert role is not None
    if role is Role.COTANGENT and type_of(value).rank:
        return MemoryRegion.SCRATCH  # staged like the batch, unless it is a scalar, as a loss's is
    return _INPUT_REGION[role]
