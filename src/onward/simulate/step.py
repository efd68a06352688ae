"""Estimate of one training step: seconds, memory of a rank, and what follows from them.

Two replays make a step. The first has the kernels and collectives of one stage for one micro-batch,
on the streams of one rank (`passes.py`); the second has the stages of all ranks of a pipeline, for
all micro-batches (`pipeline.py`). What the last micro-batch's gradients add, and the update,
follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from onward.simulate import layer
from onward.simulate.cluster import Cluster
from onward.simulate.collectives import ALL_GATHER, SEND, collective_seconds
from onward.simulate.layer import RankSizes
from onward.simulate.layout import MeshLayout, spread
from onward.simulate.memory import RankMemory, memory, rank_parameters
from onward.simulate.passes import IssuedItems, backward_pass, forward_pass, reduce_gradients
from onward.simulate.pipeline import finish
from onward.simulate.transformer import Transformer
from onward.simulate.work import all_seconds

_LAYERS = 6  # of a stage, that are replayed


@dataclass(frozen=True)
class StepEstimate:
    """One step. update: seconds of the optimizer. bubble: share of the step in which the first
    rank of a pipeline has nothing to run. flops: of the model, without recomputation."""

    model: Transformer
    layout: MeshLayout
    cluster: Cluster
    batch: int
    tokens: int
    seconds: float
    update: float
    bubble: float
    memory: RankMemory

    @property
    def flops(self) -> float:
        return self.model.step_flops(self.batch, self.tokens)

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.tokens / self.seconds

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of the model on each device."""
        return self.flops / self.seconds / self.layout.ranks

    @property
    def mfu(self) -> float:
        """The model's FLOPs over those of the devices' peak in bf16 (fp32 for fp32)."""
        dtype = "fp32" if self.layout.dtype == "fp32" else "bf16"
        return self.flops_per_device / self.cluster.device.peak(dtype)

    @property
    def fits(self) -> bool:
        """Whether a rank's bytes fit; a tenth is left to the runtime, buffers and fragments."""
        return self.memory.total <= 0.9 * self.cluster.device.memory


def estimate(
    model: Transformer, layout: MeshLayout, cluster: Cluster, batch: int, tokens: int = 0
) -> StepEstimate:
    """The estimate of a step of `batch` samples of `tokens` on all ranks of a layout. Raises
    OnwardError for a layout that the sizes do not allow."""
    tokens = tokens or model.tokens
    layout.check(model, batch, tokens)
    sizes = RankSizes(model, layout, tokens)
    micro = layout.micro_batches(batch)
    passes = _Passes(sizes, cluster)
    stages = layout.pp * layout.chunks
    transfer = _transfer(sizes, cluster)
    forward = [passes.seconds(True, stage, False) for stage in range(stages)]
    backward = [passes.seconds(False, stage, False) for stage in range(stages)]
    if not layout.overlap and layout.pp > 1:
        # a rank waits while what it sends is on its way
        forward, backward = ([s + transfer for s in each] for each in (forward, backward))
        transfer = 0.0
    ends = finish(forward, backward, layout.pp, micro, layout.schedule, transfer)
    update = 0.0
    total = 0.0
    for rank in range(layout.pp):
        parameters = rank_parameters(model, layout, rank)
        seconds = all_seconds(layer.update(parameters / layout.shards), cluster)
        after = passes.seconds(False, rank, True) - passes.seconds(False, rank, False)
        before = passes.seconds(True, rank, True) - passes.seconds(True, rank, False)
        alone = 0.0 if layout.overlap else _alone(sizes, cluster, parameters)
        if ends[rank] + before + after + alone + seconds > total:
            total = ends[rank] + before + after + alone + seconds
            update = seconds
    total += _tied(sizes, cluster)
    busy = micro * sum(forward[:: layout.pp] + backward[:: layout.pp])
    bubble = max(0.0, 1 - busy / ends[0]) if layout.pp > 1 else 0.0
    return StepEstimate(
        model, layout, cluster, batch, tokens, total, update, bubble,
        memory(model, layout, batch, tokens),
    )  # fmt: skip


class _Passes:
    """Seconds of the passes of each stage; stages that are alike are replayed once."""

    def __init__(self, sizes: RankSizes, cluster: Cluster) -> None:
        self.sizes = sizes
        self.cluster = cluster
        layout = sizes.layout
        self.counts = spread(sizes.model.layers, layout.pp * layout.chunks)
        self.known: dict[tuple[bool, int, str, bool], float] = {}

    def seconds(self, is_forward: bool, stage: int, edge: bool) -> float:
        """edge: whether it is the first forward, or the last backward, of a step."""
        edge = edge and self.sizes.layout.overlap  # else nothing is gathered or reduced beside it
        last = len(self.counts) - 1
        ends = "both" if not last else {0: "first", last: "last"}.get(stage, "")
        key = (is_forward, self.counts[stage], ends, edge)
        if key not in self.known:
            self.known[key] = self._replayed(*key)
        return self.known[key]

    def _replayed(self, is_forward: bool, layers: int, ends: str, edge: bool) -> float:
        """Layers are alike: from the fourth on, each takes what those before it took."""
        make = forward_pass if is_forward else backward_pass

        def of(count: int) -> float:
            return make(self.sizes, self.cluster, count, ends, edge).seconds()

        # without gathers and reductions beside it, no layer knows of another
        most = _LAYERS if edge or self.sizes.layout.zero >= 2 else 2
        if layers <= most:
            return of(layers)
        few, more = of(most // 2), of(most)
        return more + (layers - most) * (more - few) / (most - most // 2)


def _transfer(sizes: RankSizes, cluster: Cluster) -> float:
    """Seconds of sending one micro-batch's activations to the next rank of a pipeline; each rank
    along tp sends its part."""
    layout = sizes.layout
    if layout.pp == 1:
        return 0.0
    nbytes = sizes.hidden_bytes / layout.tp
    return collective_seconds(SEND, nbytes, layout.group("pp", cluster), cluster)


def _alone(sizes: RankSizes, cluster: Cluster, parameters: float) -> float:
    """Seconds of reducing all gradients after the backward, and of gathering what ZeRO 1 and 2 have
    updated in shards."""
    layout = sizes.layout
    line = IssuedItems(sizes, cluster)
    if layout.zero < 2:  # the others reduce in each micro-batch
        reduce_gradients(line, layout.grad_bytes * parameters, ())
    if layout.zero in (1, 2):
        line.collective(ALL_GATHER, layout.gather_bytes * parameters, "shard", ())
    return line.seconds()


def _tied(sizes: RankSizes, cluster: Cluster) -> float:
    """Seconds of adding the gradients of a table that the first and the last rank both have."""
    model, layout = sizes.model, sizes.layout
    if layout.pp == 1 or not model.tied:
        return 0.0
    nbytes = layout.grad_bytes * model.vocab * model.hidden / layout.tp
    group = layout.group("pp", cluster)
    return collective_seconds("all_reduce", nbytes, group, cluster)


__all__ = ["StepEstimate", "estimate"]
