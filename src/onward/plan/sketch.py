"""A fast estimate of the arena's bytes: lifetimes and in-place rights, no offsets.

The search for what to recompute asks it hundreds of times, where the planner would be asked once.
It follows the planner's own rules on a graph that `select` has lowered; what it leaves out (bytes
lost between buffers) is the caller's to correct from a real plan.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from onward.graph.graph import Graph, Node, Value, type_of
from onward.kernels import Kernel
from onward.plan.arena import aligned
from onward.plan.order import order
from onward.plan.select import need_of
from onward.plan.views import VIEWS, Layout, contiguous, view
from onward.plan.wishes import wishes


@dataclass(frozen=True)
class Estimate:
    """nbytes: the most bytes alive at one launch. movable: storages alive there that the launch
    does not touch, made by the forward half and read only later by the backward half."""

    nbytes: int
    movable: tuple[int, ...]


class Sketch:
    """The graph's launches over storages; a storage is the memory of a value and of its views.

    nodes: launches in order. makes, reads: storages of each. nbytes: of each storage.
    maker: the launch that makes a storage, None for inputs and constants. fixed: storages that no
    recomputing can free (inputs, constants, outputs). late: storages of the forward half that the
    backward half reads. repeatable: forward launches that overwrite nothing.
    views: of each storage, the view nodes on it.
    """

    def __init__(self, graph: Graph, kernels: dict[Node, Kernel]) -> None:
        self.nodes: list[Node] = []
        self.nbytes: list[int] = []
        self.maker: list[int | None] = []
        self.views: list[list[Node]] = []
        self.makes: list[tuple[int, ...]] = []
        self.reads: list[tuple[int, ...]] = []
        self.backward: list[bool] = []
        self._inplace: list[tuple[tuple[int, ...], ...]] = []  # per output: storages it may take
        self._transient: list[int] = []  # scratch and contiguous copies of a launch
        self._layouts: dict[Value, Layout] = {}
        self._sources = {graph.outputs[name]: source for name, source in graph.state.items()}
        nodes = order(graph)
        self._wishes = wishes(nodes, kernels, graph.output_values())
        self._shared: dict[Value, int] = {}  # owner of a wish -> its storage
        pieces: set[int] = set()  # storages that several launches write
        for value in [*graph.inputs, *graph.ir.initializers.values()]:
            self._layouts[value] = contiguous(self._storage(0, None), type_of(value))
        for node in nodes:
            x = node.inputs[0] if node.inputs else None
            made = view(node, self._layouts[x]) if node.op_type in VIEWS and x else None
            if node in self._wishes.placed:
                made = [self._wished(node.outputs[0], None)]
                pieces.add(made[0].buffer)
            if made is not None:
                self._layouts.update(zip(node.outputs, made, strict=True))
                self.views[made[0].buffer].append(node)
            else:
                self._launch(node, kernels[node])
        self.fixed = {self._layouts[v].buffer for v in graph.outputs.values()}
        self.fixed |= {i for i, maker in enumerate(self.maker) if maker is None} | pieces
        self.repeatable = [
            not late and len(made) == len(node.outputs)
            for late, made, node in zip(self.backward, self.makes, self.nodes, strict=True)
        ]
        self.late = {
            s
            for late, reads in zip(self.backward, self.reads, strict=True)
            if late
            for s in reads
            if (maker := self.maker[s]) is not None and not self.backward[maker]
        }

    def _storage(self, nbytes: int, maker: int | None) -> int:
        self.nbytes.append(nbytes)
        self.maker.append(maker)
        self.views.append([])
        return len(self.nbytes) - 1

    def _wished(self, value: Value, maker: int | None) -> Layout:
        wish = self._wishes.of[value]
        if wish.owner not in self._shared:
            self._shared[wish.owner] = self._storage(aligned(type_of(wish.owner).nbytes), maker)
        return replace(wish.layout, buffer=self._shared[wish.owner])

    def _launch(self, node: Node, kernel: Kernel) -> None:
        index = len(self.nodes)
        read = [None if v is None else self._layouts[v] for v in node.inputs]
        moved = sum(
            aligned(x.nbytes)
            for i, x in enumerate(read)
            if x is not None
            and not x.is_contiguous
            and (kernel.contiguous is None or i in kernel.contiguous)
        )
        made: list[int] = []
        rights: list[tuple[int, ...]] = []
        for out, value in enumerate(node.outputs):
            allowed = [j for o, j in kernel.inplace if o == out and j < len(node.inputs)]
            source = self._sources.get(value)
            if source is not None and any(node.inputs[j] is source for j in allowed):
                layout = self._layouts[source]  # the state is written where it lies
            elif value in self._wishes.of:
                layout = self._wished(value, index)
                if self.maker[layout.buffer] == index and layout.buffer not in made:
                    made.append(layout.buffer)  # others write their windows into it
                    rights.append(())
            else:
                storage = self._storage(aligned(type_of(value).nbytes), index)
                layout = contiguous(storage, type_of(value))
                made.append(storage)
                whole = (self._whole(node, j, value) for j in allowed)
                rights.append(tuple(s for s in whole if s is not None))
            self._layouts[value] = layout
        self.nodes.append(node)
        self.makes.append(tuple(made))
        self.reads.append(tuple({x.buffer for x in read if x is not None}))
        self.backward.append(bool(node.meta.get("backward")))
        self._inplace.append(tuple(rights))
        self._transient.append(
            moved + sum(aligned(t.nbytes) for t in kernel.scratch(need_of(node)))
        )

    def _whole(self, node: Node, j: int, value: Value) -> int | None:
        """The storage of input `j` where `value` may take all of it; else None."""
        x = node.inputs[j]
        if x is None or type_of(x) != type_of(value):
            return None
        layout = self._layouts[x]
        others = (v for v in node.inputs if v is not None and v is not x)
        if (
            self.maker[layout.buffer] is None
            or not layout.is_contiguous
            or aligned(layout.nbytes) != self.nbytes[layout.buffer]
            or any(self._layouts[v].buffer == layout.buffer for v in others)
        ):
            return None
        return layout.buffer

    # ---- estimating

    def estimate(self, again: Collection[int]) -> Estimate:
        """With the forward launches `again` done once more, each before its first late reader."""
        n, size = len(self.nodes), len(self.nbytes)
        sequence = self._sequence(again)
        end = len(sequence)
        # a storage made again has a second number: its own plus `size`
        last = [-1] * (2 * size)
        late = [end] * size  # first backward reader
        reads: list[list[int]] = []
        for position, launch in enumerate(sequence):
            node = launch % n
            is_late = launch >= n or self.backward[node]
            found: list[int] = []
            for s in self.reads[node]:
                if is_late and self.maker[s] in again:
                    s += size
                elif is_late and position < late[s]:
                    late[s] = position
                last[s] = position
                found.append(s)
            reads.append(found)
        for s in self.fixed:
            last[s] = end
        alive: dict[int, int] = {}
        now = most = 0
        movable: tuple[int, ...] = ()
        for position, launch in enumerate(sequence):
            node = launch % n
            shift = size if launch >= n else 0
            taken: set[int] = set()
            for s, rights in zip(self.makes[node], self._inplace[node], strict=True):
                for r in rights:
                    x = r if r in reads[position] else r + size
                    if x in alive and last[x] <= position and x not in taken:
                        taken.add(x)
                        alive[s + shift] = alive.pop(x)
                        break
                else:
                    alive[s + shift] = self.nbytes[s]
                    now += self.nbytes[s]
            here = now + self._transient[node]
            if here > most:
                most = here
                busy = {*reads[position], *(s + shift for s in self.makes[node])}
                movable = tuple(
                    s for s in alive if s < size and position < late[s] < end and s not in busy
                )
            for s in (*reads[position], *(s + shift for s in self.makes[node])):
                if s in alive and last[s] <= position:
                    now -= alive.pop(s)
        return Estimate(most, tuple(s for s in movable if s not in self.fixed))

    def _sequence(self, again: Collection[int]) -> list[int]:
        """Launches in order; one done again is its number plus the number of launches."""
        n = len(self.nodes)
        out: list[int] = []
        done: set[int] = set()
        for node in range(n):
            if self.backward[node] and again:
                out += [n + m for m in self._chain(node, again, done)]
            out.append(node)
        return out

    def _chain(self, node: int, again: Collection[int], done: set[int]) -> list[int]:
        """What must be done again just before `node`, in forward order."""
        chain: list[int] = []
        stack = [node]
        while stack:
            for s in self.reads[stack.pop()]:
                maker = self.maker[s]
                if maker is not None and maker in again and maker not in done:
                    done.add(maker)
                    chain.append(maker)
                    stack.append(maker)
        return sorted(chain)

    def values(self, again: Collection[int]) -> set[str]:
        """Names of the values that these launches make, and of the forward views on them."""
        names: set[str] = set()
        for node in again:
            names.update(v.name or "" for v in self.nodes[node].outputs)
            for s in self.makes[node]:
                for item in self.views[s]:
                    if not item.meta.get("backward"):
                        names.update(v.name or "" for v in item.outputs)
        return names
