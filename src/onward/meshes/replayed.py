"""Replays the plans of a mesh's ranks on a described cluster: seconds, and what is exchanged.

The launches of a plan are replayed on streams, kernels beside exchanges, each launch with the
seconds of its FLOPs and bytes (`simulate/work.py`), each exchange with those of the alpha-beta
model (`simulate/collectives.py`); a wait keeps the kernels behind it until its exchange has ended.
Ranks along `pp` have other layers, so that each has a plan of its own: what one of them receives
has been sent by another, and what all of them exchange begins when the last one is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from onward.distribute.pipeline import AXIS as PIPELINE_AXIS
from onward.graph.ops import OPS
from onward.graph.ops.collective import RECEIVE, SEND, STARTS, WAIT
from onward.graph.types import value
from onward.meshes.candidates import MeshCandidate
from onward.plan import Plan, PlannedLaunch
from onward.simulate import Cluster
from onward.simulate import collectives as kinds
from onward.simulate.collectives import Group, collective_seconds, sent_bytes
from onward.simulate.replay import COMPUTE, Item, replay
from onward.simulate.work import Work, work_seconds

EXCHANGE = "exchange"  # the stream of collectives; messages to each rank have one of their own
_KINDS: Mapping[str, str] = {
    "AllReduceStart": kinds.ALL_REDUCE,
    "ReduceScatterStart": kinds.REDUCE_SCATTER,
    "AllGatherStart": kinds.ALL_GATHER,
    "AllToAllStart": kinds.REDUCE_SCATTER,
    "BroadcastStart": kinds.ALL_GATHER,
    "ExchangeStart": kinds.SEND,
    SEND: kinds.SEND,
}
# by op and axis: the number of exchanges, bytes of whole tensors, bytes sent, seconds
Exchanges: TypeAlias = "dict[tuple[str, str], tuple[int, int, int, float]]"
_Meeting: TypeAlias = "tuple[object, ...]"  # the key that ranks along pp share of one exchange


def work_of_launch(launch: PlannedLaunch) -> Work:
    """FLOPs and bytes of a launch, as the record of its op has them; of a copy, its bytes."""
    spec = launch.spec
    if spec.op not in OPS or not spec.outputs:
        return Work(nbytes=float(2 * sum(y.nbytes for y in launch.outputs)))
    op, types = OPS[spec.op], (list(spec.inputs), list(spec.outputs))
    low = any(t is not None and t.is_low for t in spec.inputs)
    done = float(value(op.flops(*types, spec.attrs)))
    nbytes = float(value(op.moved(*types, spec.attrs)))
    return Work(done, nbytes, "bf16" if low else "fp32")


def group_along(candidate: MeshCandidate, axis: str, cluster: Cluster) -> Group:
    """The ranks along an axis: the last axis has neighbours."""
    sizes = list(candidate.sizes)
    at = [name for name, _ in sizes].index(axis)
    inner = 1
    for _, size in sizes[at + 1 :]:
        inner *= size
    ranks = sizes[at][1]
    return Group(ranks, max(1, min(ranks, cluster.per_node // inner)))


def exchanged_bytes(launch: PlannedLaunch) -> int:
    """Bytes of the whole tensors of an exchange, of all ranks together where each has a part."""
    taken = launch.outputs if launch.op == "AllGatherStart" else launch.inputs
    return sum(x.nbytes for x in taken if x is not None)


@dataclass
class ReplayedPlan:
    """The seconds of a rank's plan until its last launch has ended. computing, update, backward:
    those of its kernels, of the optimizer's among them, of the backward's."""

    seconds: float = 0.0
    computing: float = 0.0
    update: float = 0.0
    backward: float = 0.0
    exchanges: Exchanges = field(default_factory=dict)


def replayed(
    plans: Sequence[Plan], candidate: MeshCandidate, cluster: Cluster
) -> list[ReplayedPlan]:
    """Replays the plans of ranks that work together on a cluster: those along `pp`, in order, or
    one where there is no such axis. Raises OnwardError for products that its devices lack."""
    script = _ReplaySchedule(candidate, cluster)
    runs = [script.add(rank, plan) for rank, plan in enumerate(plans)]
    items = script.items()
    ends = replay(items)
    for rank, run in enumerate(runs):
        own = (end for item, end in zip(items, ends, strict=True) if item.rank == rank)
        run.seconds = max(own, default=0.0)
    return runs


@dataclass
class _Draft:
    """An item whose dependencies on other ranks are not resolved yet.

    after: places of the items of its rank that it waits for. meetings: keys of the exchanges of
    other ranks that it waits for. joins: the key of the collective that it is part of, which begins
    when all members are ready; None for other items.
    """

    item: Item
    after: tuple[int, ...]
    meetings: tuple[_Meeting, ...]
    joins: _Meeting | None = None


class _ReplaySchedule:
    """The items of all ranks."""

    def __init__(self, candidate: MeshCandidate, cluster: Cluster) -> None:
        self._candidate, self._cluster = candidate, cluster
        self._drafts: list[_Draft] = []
        self._sent: dict[_Meeting, int] = {}  # places of messages

    def add(self, rank: int, plan: Plan) -> ReplayedPlan:
        """Adds what a rank runs."""
        made, line = ReplayedPlan(), _RankTimeline(self._drafts, rank)
        started: dict[int, int | _Meeting] = {}
        for launch in plan.launches:
            number = int(launch.attrs.get("sequence", -1))
            if launch.op == RECEIVE:
                started[number] = (int(launch.attrs["source"]), rank, number)
            elif launch.op in STARTS:
                started[number] = self._start(launch, rank, line, made)
            elif launch.op == WAIT:
                line.wait(started[number])
            else:
                seconds = work_seconds(work_of_launch(launch), self._cluster)
                line.seconds += seconds
                made.computing += seconds
                # the clipping's factor and the update, but not the backward
                made.update += seconds * (launch.module == "optimizer")
                made.backward += seconds * (launch.backward and launch.module != "optimizer")
        line.flush()
        return made

    def _start(
        self, launch: PlannedLaunch, rank: int, line: _RankTimeline, made: ReplayedPlan
    ) -> int:
        """Adds an exchange; returns its place."""
        axis, number = str(launch.attrs["axis"]), int(launch.attrs["sequence"])
        group, kind = group_along(self._candidate, axis, self._cluster), _KINDS[launch.op]
        nbytes = exchanged_bytes(launch)
        seconds = collective_seconds(kind, nbytes, group, self._cluster)
        whole_sum = kind == kinds.REDUCE_SCATTER and not self._cluster.scatters
        sent = sent_bytes(kinds.ALL_REDUCE if whole_sum else kind, nbytes, group.ranks)
        key = launch.op.removesuffix("Start"), axis
        n, whole, out, spent = made.exchanges.get(key, (0, 0, 0, 0.0))
        made.exchanges[key] = n + 1, whole + nbytes, out + round(sent), spent + seconds
        link = self._cluster.in_node if group.nodes == 1 else self._cluster.across
        joins: _Meeting | None = None
        if axis == PIPELINE_AXIS and launch.op != SEND:
            pair = {rank, int(launch.attrs["partner"])} if "partner" in launch.attrs else ()
            joins = (number, *sorted(pair))
        stream = f"to {launch.attrs['to']}" if launch.op == SEND else EXCHANGE
        place = line.exchange(stream, seconds, link.sm_share, joins)
        if launch.op == SEND:
            self._sent[rank, int(launch.attrs["to"]), number] = place
        return place

    def items(self) -> list[Item]:
        """The items with the places of those that they wait for, of all ranks."""
        behind = [
            (*draft.after, *(self._sent[meeting] for meeting in draft.meetings))
            for draft in self._drafts
        ]
        together: dict[_Meeting, tuple[int, ...]] = defaultdict(tuple)
        for draft, places in zip(self._drafts, behind, strict=True):
            if draft.joins is not None:
                together[draft.joins] += places
        return [
            replace(draft.item, after=places if draft.joins is None else together[draft.joins])
            for draft, places in zip(self._drafts, behind, strict=True)
        ]


class _RankTimeline:
    """What a rank runs, one after another. seconds: of kernels since the last item."""

    def __init__(self, drafts: list[_Draft], rank: int) -> None:
        self._drafts, self._rank = drafts, rank
        self._after: tuple[int, ...] = ()
        self._meetings: tuple[_Meeting, ...] = ()
        self.seconds = 0.0

    def flush(self) -> None:
        """Makes an item of the kernels so far."""
        if self.seconds:
            item = Item(COMPUTE, self.seconds, rank=self._rank)
            self._add(item, None)
            self._after, self._meetings = (len(self._drafts) - 1,), ()
        self.seconds = 0.0

    def exchange(self, stream: str, seconds: float, sm_share: float, joins: _Meeting | None) -> int:
        """Adds an exchange behind the kernels so far; returns its place."""
        self.flush()
        self._add(Item(stream, seconds, rank=self._rank, sm_share=sm_share), joins)
        return len(self._drafts) - 1

    def wait(self, other: int | _Meeting) -> None:
        """Keeps what follows until an exchange has ended."""
        self.flush()
        if isinstance(other, int):
            self._after = (*self._after, other)
        else:
            self._meetings = (*self._meetings, other)

    def _add(self, item: Item, joins: _Meeting | None) -> None:
        self._drafts.append(_Draft(item, self._after, self._meetings, joins))


__all__ = [
    "PIPELINE_AXIS", "Exchanges", "ReplayedPlan", "exchanged_bytes", "group_along", "replayed",
    "work_of_launch",
]  # fmt: skip
