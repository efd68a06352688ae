"""MeshLayout: how a step is laid out over ranks, and what of the software decides its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onward.errors import OnwardError
from onward.simulate.cluster import Cluster
from onward.simulate.collectives import Group
from onward.simulate.transformer import Transformer


@dataclass(frozen=True)
class MeshLayout:
    """A mesh and what is done on it. Axes are torch's (DeviceMesh), schedules too.

    Neighbouring ranks lie along tp, then cp, dp_shard, dp_replicate, pp. zero: 0 to 3, of the ranks
    along dp_shard and cp. chunks: stages of a rank, of an interleaved schedule. recompute: "full"
    repeats the forward of each layer; "selective" repeats what is cheap: of attention written out
    its core, otherwise elementwise ops and every second product. attention: "flash", or "written
    out", with scores in memory. fused: whether elementwise ops are fused (a compiler or kernels
    made for it). causal: whether flash attention leaves the masked half out. grad_bytes, gather_
    bytes: of an element of the gradients and of gathered weights. overlap: whether gradients,
    gathers and transfers run beside the backward and forward. overlap_tp: whether collectives of tp
    run beside the products that need them, in tp pieces. overlap_backward: whether an input's
    gradient is summed over tp beside the product of the weight's gradient. fused_accumulation:
    whether that product adds to the sum over micro-batches itself. repeat_keys: whether keys and
    values that heads share are repeated before attention. ring: whether attention along cp runs in
    cp pieces that are merged, as torch's context_parallel does; otherwise it waits for all keys.
    gathers_again: whether, with sequence parallelism, a product's input is gathered once more for
    its weight's gradient; otherwise it is kept whole. copies_gathered: whether gathered weights are
    copied from one buffer to their places. fused_loss: whether the loss is fused where ops are.
    one_adapter: rings use one adapter of a node. free_early: weights that a recomputation has
    gathered are freed before the backward.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    zero: int = 0
    micro_batch: int = 1
    chunks: int = 1
    schedule: Literal["1F1B", "Interleaved1F1B", "GPipe"] = "1F1B"
    recompute: Literal["none", "selective", "full"] = "none"
    sequence_parallel: bool = False
    dtype: str = "bf16"
    attention: Literal["flash", "flash-1", "written out"] = "flash"
    fused: bool = True
    causal: bool = True
    dropout: bool = False
    grad_bytes: int = 4
    gather_bytes: int = 2
    overlap: bool = True
    overlap_tp: bool = False
    overlap_backward: bool = False
    fused_accumulation: bool = False
    repeat_keys: bool = False
    ring: bool = False
    gathers_again: bool = True
    copies_gathered: bool = False
    fused_loss: bool = True
    one_adapter: bool = False
    free_early: bool = False

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """Ranks with other samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks that a ZeRO stage divides state among."""
        return self.dp_shard * self.cp if self.zero else 1

    @property
    def sequence_tp(self) -> int:
        """Into how many parts tp divides the tokens of norms and dropout."""
        return self.tp if self.sequence_parallel else 1

    def micro_batches(self, batch: int) -> int:
        """Micro-batches of a rank in a step of `batch` samples in all."""
        return batch // (self.dp * self.micro_batch)

    def group(self, axis: str, cluster: Cluster) -> Group:
        """The ranks of a collective along an axis; "data" is that of replicas of gradients, "shard"
        that of shards, "pp" two neighbours."""
        inner = {
            "tp": 1, "cp": self.tp, "shard": self.tp, "pp": self.tp * self.cp * self.dp,
            "data": self.tp * self.shards,
        }[axis]  # fmt: skip
        ranks = {
            "tp": self.tp, "cp": self.cp, "shard": self.shards, "pp": 2,
            "data": self.dp * self.cp // self.shards,
        }[axis]  # fmt: skip
        return Group(ranks, max(1, min(ranks, cluster.per_node // inner)), self.one_adapter)

    def refusal(self, model: Transformer, batch: int, tokens: int) -> str:
        """Why a step cannot be laid out so; "" where it can."""
        sizes = (self.dp_replicate, self.dp_shard, self.tp, self.cp, self.pp, self.chunks)
        if min(*sizes, self.micro_batch) < 1:
            return "a size below 1"
        if not 0 <= self.zero <= 3:
            return f"ZeRO stage {self.zero}"
        if model.heads % self.tp or (model.kv_heads or model.heads) % self.tp:
            return f"{model.heads} heads ({model.kv_heads or model.heads} of keys) on tp {self.tp}"
        if tokens % self.cp:
            return f"{tokens} tokens on cp {self.cp}"
        if batch % (self.dp * self.micro_batch):
            return f"a batch of {batch} in micro-batches of {self.micro_batch} on dp {self.dp}"
        # the first and the last stage have the embedding and the head, and may have no layer
        if self.pp * self.chunks > model.layers + 2:
            return f"{model.layers} layers in {self.pp} x {self.chunks} stages"
        interleaved = self.schedule == "Interleaved1F1B"
        if (self.chunks > 1) != interleaved or (interleaved and self.pp == 1):
            return f"{self.chunks} chunks of {self.pp} stages by {self.schedule}"
        if interleaved and self.micro_batches(batch) % self.pp:
            return f"{self.micro_batches(batch)} micro-batches, interleaved, on pp {self.pp}"
        return ""

    def check(self, model: Transformer, batch: int, tokens: int) -> None:
        """Raises OnwardError for a step that cannot be laid out so."""
        why = self.refusal(model, batch, tokens)
        if why:
            raise OnwardError(f"no layout for {why}; fix: other sizes of the mesh or batch")

    def __str__(self) -> str:
        axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
        named = [f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        named += [f"chunks {self.chunks}"] if self.chunks > 1 else []
        named += [f"zero {self.zero}"] if self.zero else []
        named += [f"micro {self.micro_batch}", f"recompute {self.recompute}"]
        return ", ".join(named)


def spread(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as they can be; the first and the last, which have the
    embedding and the head, are the first to have one less."""
    each = -(-layers // stages)
    counts = [each] * stages
    places = [stages - 1, 0, *range(stages - 2, 0, -1)]
    for place in places[: each * stages - layers]:
        counts[place] -= 1
    return tuple(counts)


__all__ = ["MeshLayout", "spread"]
