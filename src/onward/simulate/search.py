"""Search: the layouts of a number of ranks whose memory fits, the fastest first.

All layouts are estimated in short, from one layer's forward and backward and the schedule's closed
form; the best of them are then replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from onward.errors import OnwardError
from onward.simulate import layer
from onward.simulate.cluster import Cluster
from onward.simulate.layer import RankSizes
from onward.simulate.layout import MeshLayout
from onward.simulate.memory import memory, rank_parameters
from onward.simulate.passes import IssuedItems, backward_pass, forward_pass, reduce_gradients
from onward.simulate.step import StepEstimate, estimate
from onward.simulate.transformer import Transformer
from onward.simulate.work import all_seconds

MICRO_BATCHES = (1, 2, 4, 8, 16)
RECOMPUTE = ("none", "selective", "full")
_DEEPEST = 128  # ranks of a pipeline that is searched
_REPLAYED = 4  # layouts that are replayed for each one that is asked for


def best_layouts(
    model: Transformer,
    cluster: Cluster,
    ranks: int,
    batch: int,
    tokens: int = 0,
    most: int = 5,
    **given: Any,
) -> list[StepEstimate]:
    """The fastest layouts that fit, at most `most`. given: fields of MeshLayout, fixed.

    Raises OnwardError where none fits, with the bytes of the smallest one.
    """
    tokens = tokens or model.tokens
    quick = _Quick(model, cluster, batch, tokens)
    limit = 0.9 * cluster.device.memory
    fitting: list[tuple[float, MeshLayout]] = []
    least = None
    fits: MeshLayout | None = None
    for layout in layouts(model, cluster, ranks, batch, tokens, given):
        # layouts come with less recomputation first: one that fits is faster than those after it
        if fits is not None and replace(layout, recompute=fits.recompute) == fits:
            continue
        nbytes = memory(model, layout, batch, tokens).total
        least = nbytes if least is None else min(least, nbytes)
        if nbytes <= limit:
            fits = layout
            fitting.append((quick.seconds(layout), layout))
    if least is None:
        raise OnwardError(
            f"no mesh of {ranks} ranks divides this model and a batch of {batch}; "
            "fix: a batch that is a multiple of more ranks, or other sizes"
        )
    if not fitting:
        raise OnwardError(
            f"no mesh of {ranks} ranks fits: the smallest needs {least / 2**30:.1f} GiB of a "
            f"device's {cluster.device.memory / 2**30:.1f}; fix: more ranks, or fewer tokens"
        )
    fitting.sort(key=lambda each: each[0])
    found = [
        estimate(model, layout, cluster, batch, tokens) for _, layout in fitting[: _REPLAYED * most]
    ]
    return sorted(found, key=lambda each: each.seconds)[:most]


def layouts(
    model: Transformer, cluster: Cluster, ranks: int, batch: int, tokens: int, given: dict[str, Any]
) -> Iterator[MeshLayout]:
    """Every layout of the ranks that the sizes allow: tp within a node, any pp, the rest data, with
    ZeRO 0, 1 or 3; sequence parallelism with tp; interleaved schedules with pp."""

    def among(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (given[name],) if name in given else values

    powers = tuple(2**i for i in range(ranks.bit_length()))
    inside = tuple(t for t in (*powers, 7, 6, 5, 3) if t <= min(ranks, cluster.per_node))
    for tp in among("tp", inside):
        for cp in among("cp", (1,)):
            for pp in among("pp", _depths(model, ranks)):
                rest, odd = divmod(ranks, tp * cp * pp)
                if odd:
                    continue
                for zero in among("zero", (0, 1, 3) if rest * cp > 1 else (0,)):
                    whole = rest // given["dp_shard"] if "dp_shard" in given else 0
                    replicate = given.get("dp_replicate", whole or (1 if zero else rest))
                    shard = given.get("dp_shard", rest // replicate)
                    if replicate * shard != rest:
                        continue
                    for micro in among("micro_batch", MICRO_BATCHES):
                        for chunks in among("chunks", (1, 2, 4, 8) if pp > 1 else (1,)):
                            for recompute in among("recompute", RECOMPUTE):
                                layout = MeshLayout(
                                    replicate, shard, tp, cp, pp, zero, micro, chunks,
                                    "Interleaved1F1B" if chunks > 1 else "1F1B", recompute,
                                )  # fmt: skip
                                layout = replace(layout, sequence_parallel=tp > 1)
                                layout = replace(layout, **given)
                                if not layout.refusal(model, batch, tokens):
                                    yield layout


def _depths(model: Transformer, ranks: int) -> tuple[int, ...]:
    """RankSizes of a pipeline whose stages have as many layers each."""
    most = min(model.layers, ranks, _DEEPEST)
    return tuple(p for p in range(1, most + 1) if model.layers % p == 0)


@dataclass
class _Quick:
    """Seconds of a step in short: never what is reported."""

    model: Transformer
    cluster: Cluster
    batch: int
    tokens: int
    known: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def seconds(self, layout: MeshLayout) -> float:
        micro = layout.micro_batches(self.batch)
        sizes = RankSizes(self.model, layout, self.tokens)
        each = self._layer(sizes) * self.model.layers / layout.pp
        ends = [*layer.head(sizes, 0), *layer.head(sizes, 1)]
        head = all_seconds(ends, self.cluster)
        parameters = rank_parameters(self.model, layout, 0)
        update = all_seconds(layer.update(parameters / layout.shards), self.cluster)
        line = IssuedItems(sizes, self.cluster)
        if layout.zero < 2:
            reduce_gradients(line, layout.grad_bytes * parameters, ())
        hidden = each if layout.overlap else 0.0  # beside the last micro-batch
        exposed = max(0.0, line.seconds() - 0.7 * hidden)
        bubble = (layout.pp - 1) / layout.chunks
        return (micro + bubble) * each + micro * head + update + exposed

    def _layer(self, sizes: RankSizes) -> float:
        layout = sizes.layout
        sharded = layout.shards if layout.zero == 3 else 1
        key = (
            layout.tp, layout.cp, sharded, layout.micro_batch, layout.recompute,
            layout.sequence_parallel, layout.dp if sharded > 1 else 1,
        )  # fmt: skip
        if key not in self.known:
            # three layers, so that gathers run ahead of one
            passes = (
                make(sizes, self.cluster, 3, "", False) for make in (forward_pass, backward_pass)
            )
            self.known[key] = sum(line.seconds() for line in passes) / 3
        return self.known[key]


__all__ = ["best_layouts", "layouts"]
