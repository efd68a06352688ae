"""Bytes of a rank: weights, gradients, moments, activations.

Mixed precision keeps 2 bytes of weights, `grad_bytes` of gradients, and 12 of the master weight and
Adam's moments for each parameter; ZeRO divides the last by its shards from stage 1, gradients from
stage 2, weights from stage 3 (Rajbhandari et al., 2020). Activations follow Korthikanti et al.
(2022), whose 34 h + 5 a s bytes a token are the sum below for a GPT with dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

from onward.simulate.layer import RankSizes
from onward.simulate.layout import MeshLayout, spread
from onward.simulate.pipeline import in_flight
from onward.simulate.transformer import Transformer


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the fullest rank."""

    weights: float
    gradients: float
    moments: float
    activations: float

    @property
    def state(self) -> float:
        return self.weights + self.gradients + self.moments

    @property
    def total(self) -> float:
        return self.state + self.activations


def rank_parameters(model: Transformer, layout: MeshLayout, rank: int) -> float:
    """Parameters of one rank of the pipeline, before ZeRO; a tied head has a copy of the table."""
    counts = spread(model.layers, layout.pp * layout.chunks)
    found = float(sum(counts[rank :: layout.pp])) * model.layer_parameters
    last = rank == layout.pp - 1
    if rank == 0:
        found += model.embedding_parameters
    if last:
        found += model.head_parameters
        if model.tied and layout.pp > 1:
            found += model.vocab * model.hidden
    return found / layout.tp


def layer_activations(sizes: RankSizes, kept: str) -> float:
    """Bytes that one layer keeps for its backward of one micro-batch. kept: "none", "selective" or
    "full", the recomputation."""
    model, layout = sizes.model, sizes.layout
    h, e = model.hidden, sizes.element
    tp, sequence = layout.tp, layout.sequence_tp
    if kept == "full":
        return sizes.rows * e * h / sequence
    qkv = e * (h + 2 * model.kv_width)
    inner = e * model.width * (2 if model.gated else 1)
    written = layout.attention == "written out"
    if kept == "selective" and not written:
        shared = 2 * e * h / sequence
        divided = (qkv / 2 + e * h + inner / 2) / tp
        return sizes.rows * (shared + divided)
    # inputs of both norms, and of the products after them, which may be kept as they were gathered
    shared = 2 * e * h / sequence + 2 * e * h / (sequence if layout.gathers_again else 1)
    if layout.dropout:
        shared += 2 * h / sequence
    divided = qkv + e * h + inner + e * model.width
    if written and kept == "none":
        each = 2 * e + 1 if layout.dropout else e
        divided += each * model.heads * sizes.tokens
    return sizes.rows * (shared + divided / tp)


def memory(model: Transformer, layout: MeshLayout, batch: int, tokens: int) -> RankMemory:
    """Bytes of the fullest rank in a step of `batch` samples of `tokens`."""
    sizes = RankSizes(model, layout, tokens)
    found = [_of_rank(sizes, rank, batch) for rank in sorted({0, layout.pp - 1})]
    return max(found, key=lambda each: each.total)


def _of_rank(sizes: RankSizes, rank: int, batch: int) -> RankMemory:
    model, layout = sizes.model, sizes.layout
    parameters = rank_parameters(model, layout, rank)
    e = sizes.element
    moments = 8 if layout.dtype == "fp32" else 12
    weights = e * parameters
    if layout.zero == 3:
        # two layers, and what is before the first and after the last one, are whole at a time
        ends = model.embedding_parameters + model.head_parameters if layout.pp == 1 else 0
        whole = layout.gather_bytes * (2 * model.layer_parameters + ends) / layout.tp
        weights = weights / layout.shards + (whole if layout.shards > 1 else 0)
    gradients = layout.grad_bytes * parameters / (layout.shards if layout.zero >= 2 else 1)
    if layout.zero >= 2 and layout.shards > 1:
        # one layer's, as they are made and as they are reduced
        gradients += (e + layout.grad_bytes) * model.layer_parameters / layout.tp
    micro = layout.micro_batches(batch)
    held = in_flight(rank, layout.pp, layout.chunks, micro, layout.schedule)
    counts = spread(model.layers, layout.pp * layout.chunks)[rank :: layout.pp]
    layers = held * sum(counts) / layout.chunks
    activations = layers * layer_activations(sizes, layout.recompute)
    if layout.recompute != "none":
        activations += layer_activations(sizes, "none")
    if rank == layout.pp - 1:
        # logits and their gradient; unfused, log-softmax and two gradients in fp32, one in 16 bits
        each = 8 if layout.fused and layout.fused_loss else 14
        activations += sizes.rows * model.vocab / layout.tp * each
    return RankMemory(weights, gradients, moments * parameters / layout.shards, activations)


__all__ = ["RankMemory", "layer_activations", "memory", "rank_parameters"]
