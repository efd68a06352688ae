"""What the software of a layout costs: each switch of a MeshLayout against plain arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onward.simulate import PRESETS, Cluster, MeshLayout, Transformer, built_in, estimate
from onward.simulate import layer as kernels
from onward.simulate.layer import RankSizes
from onward.simulate.memory import memory
from onward.simulate.passes import IssuedItems
from onward.simulate.work import Work, all_seconds, work_seconds

MODEL = Transformer(4096, 4, 32, 1000, kv_heads=8)
H100 = built_in("h100")
# no collective takes processors, and memory is never asked for more than it has
CALM = replace(
    H100,
    device=replace(H100.device, memory_bandwidth=1e16),
    in_node=replace(H100.in_node, sm_share=0.0, latency=0.0),
    across=replace(H100.across, sm_share=0.0, latency=0.0),
)
TOKENS = 2048
HIDDEN = TOKENS * 4096 * 2  # bytes between two layers, of one sample


def seconds(layout: MeshLayout, cluster: Cluster = CALM, batch: int = 8) -> float:
    return estimate(MODEL, layout, cluster, batch, TOKENS).seconds


def in_node(nbytes: float, ranks: int) -> float:
    """A gather in a ring within a node, without latency."""
    return (ranks - 1) / ranks * nbytes / (450e9 * H100.efficiency.in_node)


def test_flash_attention_is_as_fast_as_its_authors_say() -> None:
    """FlashAttention-2's forward on an H100, 128 features a head, causal (Shah et al., 2024,
    figure 5), in TFLOP/s by the length."""
    published = {512: 191, 1024: 260, 2048: 298, 4096: 319, 8192: 333, 16384: 335}
    for tokens, rate in published.items():
        (work,) = kernels.attention_core(RankSizes(MODEL, MeshLayout(), tokens), 0)
        found = work.flops / work_seconds(replace(work, nbytes=0.0), H100)
        assert found / 1e12 == pytest.approx(rate, rel=0.11)
        first = MeshLayout(attention="flash-1")
        (work,) = kernels.attention_core(RankSizes(MODEL, first, tokens), 0)
        assert found == pytest.approx(
            2 * work.flops / work_seconds(replace(work, nbytes=0.0), H100)
        )


def test_a_kernel_that_moves_bytes_while_it_multiplies_takes_the_longer_of_both() -> None:
    both = Work(1e12, 1e9)
    apart = [replace(both, nbytes=0.0), replace(both, flops=0.0)]
    times = [work_seconds(each, H100) for each in apart]
    assert work_seconds(both, H100) == pytest.approx(sum(times))
    assert work_seconds(replace(both, beside=True), H100) == pytest.approx(max(times))
    few = replace(both, flops=1e3, beside=True)
    assert work_seconds(few, H100) == pytest.approx(times[1])


def test_sums_of_gradients_run_beside_the_products_of_weights() -> None:
    """Two sums over tp in each backward of a layer are hidden, each an all-reduce."""
    layout = MeshLayout(tp=2)
    hidden = seconds(layout) - seconds(replace(layout, overlap_backward=True))
    assert hidden == pytest.approx(8 * 4 * 2 * 2 * in_node(HIDDEN, 2), rel=1e-6)


@pytest.mark.parametrize("again", [False, True])
def test_with_sequence_parallelism_gathers_are_hidden_too(again: bool) -> None:
    """Two scattered sums, and two gathers where inputs are gathered again."""
    layout = MeshLayout(tp=2, sequence_parallel=True, gathers_again=again)
    hidden = seconds(layout) - seconds(replace(layout, overlap_backward=True))
    assert hidden == pytest.approx(8 * 4 * (4 if again else 2) * in_node(HIDDEN, 2), rel=1e-6)


def test_inputs_that_are_kept_are_not_gathered_again_but_held() -> None:
    layout = MeshLayout(tp=2, sequence_parallel=True)
    kept = replace(layout, gathers_again=False)
    assert seconds(layout) - seconds(kept) == pytest.approx(8 * 4 * 2 * in_node(HIDDEN, 2))
    more = memory(MODEL, kept, 8, TOKENS).total - memory(MODEL, layout, 8, TOKENS).total
    assert more == pytest.approx(4 * 2 * HIDDEN / 2)
    # a selective recomputation repeats both gathers of a layer
    again = [replace(each, recompute="selective") for each in (layout, kept)]
    assert seconds(again[0]) == pytest.approx(seconds(again[1]), rel=1e-6)


def test_products_that_add_to_sums_themselves_save_their_kernels() -> None:
    layout = MeshLayout(micro_batch=2)
    cluster = replace(H100, device=replace(H100.device, bf16=1e12))  # products take the longest
    saved = seconds(layout, cluster) - seconds(replace(layout, fused_accumulation=True), cluster)
    # a layer has four products and an element of 2 bytes; sums have 4 and are read and written
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 2 * 4096 * 16384
    rows = 2 * TOKENS
    operands = 2 * (weights + rows * (4096 + 6144) + rows * 2 * 4096 + 2 * rows * (4096 + 16384))
    bandwidth = 3.35e12 * H100.efficiency.memory
    ramps = 2 * 4 * 1e-6 / H100.efficiency.memory
    expected = 4 * 4 * ((operands + (2 + 2 * 4) * weights) / bandwidth + ramps)
    assert saved == pytest.approx(expected, rel=1e-6)


def test_fp8_gathers_what_is_quantized() -> None:
    layout = MeshLayout(tp=2, sequence_parallel=True, gathers_again=False)
    sizes = RankSizes(MODEL, layout, TOKENS)
    assert sizes.gathered_bytes == HIDDEN
    assert RankSizes(MODEL, replace(layout, dtype="fp8"), TOKENS).gathered_bytes == HIDDEN / 2


def test_gathered_weights_are_copied_in_forward_and_backward() -> None:
    layout = MeshLayout(zero=3, dp_shard=2)
    copied = replace(layout, copies_gathered=True)
    slow = replace(CALM, device=replace(CALM.device, memory_bandwidth=1e12))
    slow = replace(slow, in_node=replace(slow.in_node, bandwidth=1e15))
    each = 2 * 2 * MODEL.layer_parameters / (1e12 * H100.efficiency.memory)
    ramp = 1e-6 / H100.efficiency.memory
    more = seconds(copied, slow) - seconds(layout, slow)
    assert more == pytest.approx(4 * 4 * 2 * (each + ramp), rel=1e-3)


def test_a_loss_that_is_not_fused_moves_more_and_holds_more() -> None:
    layout = MeshLayout(fused_loss=False)
    base = MeshLayout()
    logits = TOKENS * 1000
    more = memory(MODEL, layout, 8, TOKENS).total - memory(MODEL, base, 8, TOKENS).total
    assert more == 6 * logits
    sizes = [RankSizes(MODEL, each, TOKENS) for each in (layout, base)]
    moved = [kernels.head(each, 0)[-1].nbytes + kernels.head(each, 1)[-1].nbytes for each in sizes]
    assert moved[0] - moved[1] == 16 * logits


# ---- context parallelism


def test_keys_are_passed_as_attention_takes_them() -> None:
    sizes = RankSizes(MODEL, MeshLayout(cp=4), TOKENS)
    assert kernels.keys_bytes(sizes) == 2 * 2 * TOKENS * 1024
    repeated = RankSizes(MODEL, MeshLayout(cp=4, repeat_keys=True), TOKENS)
    assert kernels.keys_bytes(repeated) == 2 * 2 * TOKENS * 4096
    (plain,) = kernels.attention_core(sizes, 0)
    copy, attention = kernels.attention_core(repeated, 0)
    assert attention.flops == plain.flops
    # an eighth of the keys of a rank is read, and all of them are written, keys and values
    assert copy.nbytes == 2 * 2 * TOKENS / 4 * (4096 + 1024)


def test_a_ring_hides_what_it_passes_round() -> None:
    """A ring gathers beside its first piece, and passes gradients on beside the others."""
    tokens, layout = 32768, MeshLayout(cp=2)
    both = [
        estimate(MODEL, each, CALM, 8, tokens).seconds
        for each in (layout, replace(layout, ring=True))
    ]
    gather = in_node(2 * 2 * tokens * 1024, 2)
    # two gathers and a sum are waited for; six more kernels start
    more = 6 * 1e-6 / H100.efficiency.memory
    assert (both[0] - both[1]) / (8 * 4) == pytest.approx(3 * gather - more, rel=0.01)
    ring = MeshLayout(ring=True)
    merged = kernels.attention_core(RankSizes(MODEL, replace(ring, cp=4), TOKENS), 0)
    assert len(merged) == 1 + 3
    assert all_seconds(merged[1:], H100) > 0


# ---- collectives beside kernels


@pytest.mark.parametrize(
    ("shards", "tp", "rate", "sm_share"),
    [
        (8, 1, 450e9 * H100.efficiency.in_node, 0.15),
        (64, 1, min(8 * 50e9 * 0.9, 450e9 * H100.efficiency.in_node), 0.15),
        (8, 8, 50e9 * 0.9, 0.02),
    ],
    ids=["in a node", "eight of each node", "one of each node"],
)
def test_what_a_collective_takes_from_kernels_beside_it(
    shards: int, tp: int, rate: float, sm_share: float
) -> None:
    """Twice its own rate from memory; a ring over several ranks of a node also runs inside it."""
    line = IssuedItems(RankSizes(MODEL, MeshLayout(zero=3, dp_shard=shards, tp=tp), TOKENS), H100)
    assert line.collective("all_gather", 1e9, "shard", ()) == 0
    assert line.items[0].memory_share == pytest.approx(2 * rate / 3.35e12)
    assert line.items[0].sm_share == sm_share


# ---- published memory


@pytest.mark.parametrize(
    ("shards", "fused", "gib"),
    [(8, False, 82.4), (8, True, 77.0), (128, False, 67.0), (128, True, 62.0)],
)
def test_memory_of_a_rank_of_fsdp(shards: int, fused: bool, gib: float) -> None:
    """torchtitan's page of December 2024: Llama 3 8B on H100, selective recomputation."""
    layout = MeshLayout(
        zero=3, dp_shard=shards, micro_batch=2, recompute="selective", fused=fused, fused_loss=False
    )
    found = memory(PRESETS["llama3-8b"], layout, 2 * shards, 8192).total / 2**30
    assert found == pytest.approx(gib, rel=0.06)
