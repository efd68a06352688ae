"""A forward and a backward of one stage for one micro-batch: items on streams, and their replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from onward.simulate import layer
from onward.simulate.cluster import Cluster
from onward.simulate.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    collective_seconds,
    rate,
)
from onward.simulate.layer import RankSizes
from onward.simulate.replay import COMPUTE, Item, replay
from onward.simulate.work import Work, all_seconds, memory_share

DATA = "data"  # the stream of gradients and gathered weights


@dataclass
class IssuedItems:
    """Items of one rank, in the order in which they are issued."""

    sizes: RankSizes
    cluster: Cluster
    items: list[Item] = field(default_factory=list)
    last: tuple[int, ...] = ()
    known: dict[str, IssuedItems] = field(default_factory=dict)  # items of a layer, by name

    def compute(self, works: Sequence[Work], after: tuple[int, ...] = ()) -> int:
        """Kernels, after all that the line waits for and `after`."""
        seconds = all_seconds(works, self.cluster)
        share = memory_share(works, self.cluster)
        self.items.append(Item(COMPUTE, seconds, (*self.last, *after), memory_share=share))
        self.last = (len(self.items) - 1,)
        return self.last[0]

    def collective(
        self, kind: str, nbytes: float, axis: str, after: tuple[int, ...], part: float = 1.0
    ) -> int | None:
        """A collective over an axis; None where the axis has one rank. part: of its seconds."""
        group = self.sizes.layout.group(axis, self.cluster)
        seconds = part * collective_seconds(kind, nbytes, group, self.cluster)
        if not seconds:
            return None
        # a ring over several ranks of each node runs on the links within nodes too
        link = self.cluster.across if group.in_node == 1 else self.cluster.in_node
        # a collective reads and writes each byte that comes in
        share = min(1.0, 2 * rate(group, self.cluster) / self.cluster.device.memory_bandwidth)
        stream = DATA if axis in ("data", "shard") else axis
        self.items.append(Item(stream, seconds, after, 0, link.sm_share, share))
        return len(self.items) - 1

    def wait(self, kind: str, nbytes: float, axis: str, part: float = 1.0) -> None:
        """A collective that the next kernels wait for."""
        found = self.collective(kind, nbytes, axis, self.last, part)
        if found is not None:
            self.last = (found,)

    def again(self, name: str, make: Callable[[IssuedItems], None], after: tuple[int, ...]) -> None:
        """The items that `make` issues, after all that the line waits for and `after`; they are
        made once for each name."""
        if name not in self.known:
            self.known[name] = IssuedItems(self.sizes, self.cluster)
            make(self.known[name])
        found, offset = self.known[name], len(self.items)
        start = (*self.last, *after)
        for item in found.items:
            waits = tuple(place + offset for place in item.after) or start
            self.items.append(
                Item(item.stream, item.seconds, waits, 0, item.sm_share, item.memory_share)
            )
        self.last = tuple(place + offset for place in found.last)

    def seconds(self) -> float:
        """Seconds until all has ended."""
        return max(replay(self.items), default=0.0)


def _around(line: IssuedItems, works: Sequence[Work], kind: str, nbytes: float) -> None:
    """Kernels with a collective of tp that belongs to them; beside them where tp overlaps: then all
    but one piece of it is hidden as far as the kernels last."""
    tp = line.sizes.layout.tp
    if not line.sizes.layout.overlap_tp or tp == 1:
        line.wait(kind, nbytes, "tp")
        line.compute(works)
        return
    before = line.last
    line.wait(kind, nbytes, "tp", 1 / tp)
    beside = line.collective(kind, nbytes, "tp", before, 1 - 1 / tp)
    line.compute(works)
    if beside is not None:
        line.last = (*line.last, beside)


def forward_layer(line: IssuedItems) -> None:
    """One layer's forward."""
    sizes = line.sizes
    layout, nbytes = sizes.layout, sizes.gathered_bytes
    whole = layout.sequence_parallel
    line.compute([layer.norm(sizes, 0)])
    if whole:
        _around(line, layer.attention_in(sizes, 0), ALL_GATHER, nbytes)
    else:
        line.compute(layer.attention_in(sizes, 0))
    _attention(line, 0)
    line.compute(layer.attention_out(sizes, 0))
    _sum(line, [layer.residual(sizes, 0), layer.norm(sizes, 0)])
    if whole:
        _around(line, layer.mlp_in(sizes, 0), ALL_GATHER, nbytes)
    else:
        line.compute(layer.mlp_in(sizes, 0))
    line.compute(layer.mlp_out(sizes, 0))
    _sum(line, [layer.residual(sizes, 0)])


def _sum(line: IssuedItems, works: Sequence[Work]) -> None:
    """The sum over tp at the end of a branch, and what follows it."""
    layout = line.sizes.layout
    kind = REDUCE_SCATTER if layout.sequence_parallel else ALL_REDUCE
    if layout.overlap_tp and layout.tp > 1 and line.items[-1].stream == COMPUTE:
        # runs beside the product before it: what that product cannot hide is waited for
        product = line.items[-1].seconds
        group = layout.group("tp", line.cluster)
        whole = collective_seconds(kind, line.sizes.hidden_bytes, group, line.cluster)
        exposed = max(whole / layout.tp, whole - product * (1 - line.cluster.in_node.sm_share))
        line.wait(kind, line.sizes.hidden_bytes, "tp", exposed / whole if whole else 1.0)
        works = [layer.pieces_summed(line.sizes), *works]
    else:
        line.wait(kind, line.sizes.hidden_bytes, "tp")
    line.compute(works)


def _attention(line: IssuedItems, way: int) -> None:
    """Attention, for which keys and values of all ranks along cp are gathered; backward, their
    gradients are summed. A ring's first piece needs those of its own rank alone; its gradients are
    in fp32 and go round beside the pieces."""
    sizes = line.sizes
    nbytes, cp = layer.keys_bytes(sizes), sizes.layout.cp
    core = layer.attention_core(sizes, way)
    if not sizes.layout.ring or cp == 1:
        line.wait(ALL_GATHER, nbytes, "cp")
        line.compute(core)
        if way:
            line.wait(REDUCE_SCATTER, nbytes, "cp")
        return
    keys = line.collective(ALL_GATHER, nbytes, "cp", line.last)
    pieces = [replace(work, flops=work.flops / cp, nbytes=work.nbytes / cp) for work in core]
    line.compute(pieces)
    rest = [
        replace(work, flops=work.flops * (1 - 1 / cp), nbytes=work.nbytes * (1 - 1 / cp))
        for work in core
    ]
    before = line.last
    gradients = (
        line.collective(REDUCE_SCATTER, 4 / sizes.element * nbytes, "cp", before) if way else None
    )
    line.compute(rest, () if keys is None else (keys,))
    line.last = (*line.last, *(() if gradients is None else (gradients,)))


def _recompute(line: IssuedItems) -> None:
    """One layer's forward, as far as a selective recomputation repeats it; gathers of the inputs of
    both branches are among it, unless products gather them again."""
    sizes = line.sizes
    if sizes.layout.sequence_parallel and not sizes.layout.gathers_again:
        for _ in range(2):
            line.wait(ALL_GATHER, sizes.gathered_bytes, "tp")
    line.compute(_cheap(sizes))


def _cheap(sizes: RankSizes) -> list[Work]:
    """The kernels that a selective recomputation repeats."""
    if sizes.layout.attention == "written out":
        return layer.attention_core(sizes, 0)
    products = [*layer.attention_in(sizes, 0), *layer.mlp_in(sizes, 0)]
    elementwise = [work for work in products if not work.flops]
    every = [*products, *layer.attention_out(sizes, 0), *layer.mlp_out(sizes, 0)]
    matrices = [work for work in every if work.flops]
    half = [Work(w.flops / 2, w.nbytes / 2, w.dtype, w.attention) for w in matrices]
    norms = [layer.norm(sizes, 0)] * 2
    return [*norms, layer.residual(sizes, 0), *elementwise, *half]


def backward_layer(line: IssuedItems) -> None:
    """One layer's backward, its recomputation not included."""
    sizes = line.sizes
    nbytes = sizes.hidden_bytes
    whole = sizes.layout.sequence_parallel
    line.compute([layer.residual(sizes, 1)])
    if whole:
        _around(line, layer.mlp_out(sizes, 1), ALL_GATHER, nbytes)
    else:
        line.compute(layer.mlp_out(sizes, 1))
    _products_in(line, layer.mlp_in(sizes, 1), [layer.norm(sizes, 1), layer.residual(sizes, 1)])
    if whole:
        _around(line, layer.attention_out(sizes, 1), ALL_GATHER, nbytes)
    else:
        line.compute(layer.attention_out(sizes, 1))
    _attention(line, 1)
    _products_in(line, layer.attention_in(sizes, 1), [layer.norm(sizes, 1)])


def _products_in(line: IssuedItems, works: Sequence[Work], then: Sequence[Work]) -> None:
    """Backward of the products at the start of a branch, the sum over tp of their input's gradient,
    and what follows it. With sequence parallelism the input is gathered again for the gradient of
    the weight; that of the input runs beside the gather, and its sum beside the weight's, where the
    layout overlaps them."""
    sizes = line.sizes
    layout, nbytes = sizes.layout, sizes.hidden_bytes
    whole = layout.sequence_parallel
    gathers = whole and layout.gathers_again
    if not layout.overlap_backward or layout.tp == 1:
        again = line.collective(ALL_GATHER, nbytes, "tp", line.last) if gathers else None
        line.compute(works, () if again is None else (again,))
        _sum(line, then)
        return
    again = line.collective(ALL_GATHER, nbytes, "tp", line.last) if gathers else None
    line.compute([work for work in works if not work.of_weight])
    kind = REDUCE_SCATTER if whole else ALL_REDUCE
    summed = line.collective(kind, nbytes, "tp", line.last)
    line.compute([work for work in works if work.of_weight], () if again is None else (again,))
    line.last = (*line.last, *(() if summed is None else (summed,)))
    line.compute(then)


def _shard_bytes(sizes: RankSizes, each: int) -> float:
    return each * sizes.model.layer_parameters / sizes.layout.tp


def forward_pass(
    sizes: RankSizes, cluster: Cluster, layers: int, ends: str, first: bool
) -> IssuedItems:
    """A stage's forward. ends: "first", "last", "both" or "": which ends of the model it holds.

    first: the first micro-batch, which gathers weights that were updated in shards (ZeRO 1, 2);
    ZeRO-3 gathers each layer's in each forward, the next one's while a layer runs.
    """
    line = IssuedItems(sizes, cluster)
    gathers = sizes.layout.zero == 3 or (first and sizes.layout.zero and sizes.layout.overlap)
    if ends in ("first", "both"):
        if gathers:
            line.wait(ALL_GATHER, _table_bytes(sizes, sizes.layout.gather_bytes), "shard")
        line.compute(layer.embedding(sizes, 0))
    ended: list[int] = []
    for i in range(layers):
        line.again("forward", forward_layer, _weights(line, ended, i) if gathers else ())
        ended.append(line.last[0])
    if ends in ("last", "both"):
        line.compute(layer.head(sizes, 0))
    return line


def _table_bytes(sizes: RankSizes, each: int) -> float:
    return each * sizes.model.embedding_parameters / sizes.layout.tp


def _weights(line: IssuedItems, layers: Sequence[int], i: int) -> tuple[int, ...]:
    """The gather of the weights of layer i, and their copy where the layout makes one."""
    sizes, gathered = line.sizes, _gather(line, layers, i)
    if not gathered or not sizes.layout.copies_gathered:
        return gathered
    line.compute([layer.copied_weights(sizes, sizes.model.layer_parameters)], gathered)
    return ()


def _gather(line: IssuedItems, layers: Sequence[int], i: int) -> tuple[int, ...]:
    """The gather of the weights of layer i, which runs while the one before it computes: two layers
    are whole at a time. layers: the last item of each layer so far."""
    ended = (layers[i - 2],) if i > 1 else ()
    nbytes = _shard_bytes(line.sizes, line.sizes.layout.gather_bytes)
    found = line.collective(ALL_GATHER, nbytes, "shard", ended)
    return () if found is None else (found,)


def backward_pass(
    sizes: RankSizes, cluster: Cluster, layers: int, ends: str, final: bool
) -> IssuedItems:
    """A stage's backward, with recomputation. final: the last micro-batch, whose gradients are
    reduced, layer by layer beside the backward where the layout overlaps; ZeRO-2 and 3 reduce those
    of each micro-batch."""
    line = IssuedItems(sizes, cluster)
    layout = sizes.layout
    reduces = layout.zero >= 2 or (layout.overlap and final)
    if ends in ("last", "both"):
        line.compute(layer.head(sizes, 1))
    before: list[int] = []  # the last item of each layer so far
    for i in range(layers):
        gathered = _weights(line, before, i) if layout.zero == 3 else ()
        if i and reduces:
            _reduce(line, (before[-1],))
        if layout.recompute == "full":
            line.again("forward", forward_layer, gathered)
            if layout.free_early and layout.zero == 3:
                gathered = _weights(line, before, i)
        elif layout.recompute == "selective":
            line.again("recompute", _recompute, gathered)
        line.again("backward", backward_layer, gathered)
        before.append(line.last[0])
    if layers and reduces:
        _reduce(line, (before[-1],))
    if ends in ("first", "both"):
        line.compute(layer.embedding(sizes, 1))
        if reduces:
            reduce_gradients(line, _table_bytes(sizes, layout.grad_bytes), line.last)
    return line


def _reduce(line: IssuedItems, after: Iterable[int]) -> None:
    """The gradients of one layer over all ranks that have other samples or tokens."""
    layout = line.sizes.layout
    nbytes = _shard_bytes(line.sizes, layout.grad_bytes)
    reduce_gradients(line, nbytes, tuple(after))


def reduce_gradients(line: IssuedItems, nbytes: float, after: tuple[int, ...]) -> None:
    """Gradients of `nbytes`: scattered sums among shards, and sums of shards among replicas."""
    found = line.collective(REDUCE_SCATTER, nbytes, "shard", after)
    rest = after if found is None else (found,)
    line.collective(ALL_REDUCE, nbytes / line.sizes.layout.shards, "data", rest)


__all__ = [
    "DATA", "IssuedItems", "backward_layer", "backward_pass", "forward_layer", "forward_pass",
    "reduce_gradients",
]  # fmt: skip
