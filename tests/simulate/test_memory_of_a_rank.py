"""Memory of a rank against the formulae of ZeRO's and of Megatron's papers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.simulate import MeshLayout, Transformer
from onward.simulate.layer import RankSizes
from onward.simulate.memory import layer_activations, memory, rank_parameters

MODEL = Transformer(4096, 36, 32, 51200)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [2, 64])
def test_state_is_that_of_zero(stage: int, n: int) -> None:
    """2 + 2 + 12 bytes of a parameter (Rajbhandari et al., 2020, figure 1); beside the shards of
    stages 2 and 3 the gradients of a layer are whole, as they are made and as they are reduced, and
    in stage 3 the weights of two layers and of both ends of the model."""
    layout = MeshLayout(zero=stage, grad_bytes=2)
    layout = replace(layout, dp_shard=n) if stage else replace(layout, dp_replicate=n)
    psi = MODEL.parameters
    layer = MODEL.layer_parameters
    whole = 2 * layer + MODEL.vocab * MODEL.hidden + 2 * MODEL.hidden
    expected = {
        0: (2 + 2 + 12) * psi,
        1: (2 + 2 + 12 / n) * psi,
        2: (2 + (2 + 12) / n) * psi + (2 + 2) * layer,
        3: (2 + 2 + 12) / n * psi + 2 * whole + (2 + 2) * layer,
    }
    assert memory(MODEL, layout, 2 * n, 128).state == pytest.approx(expected[stage])


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("sequence", [False, True])
def test_activations_of_a_layer_are_megatrons(t: int, sequence: bool) -> None:
    """Korthikanti et al. (2022), table 2, with attention written out and dropout."""
    layout = MeshLayout(tp=t, sequence_parallel=sequence, attention="written out", dropout=True)
    s, b, h, a = 2048, 1, MODEL.hidden, MODEL.heads
    sizes = RankSizes(MODEL, layout, s)
    scores = 5 * a * s / h
    none = s * b * h * ((34 + scores) / t if sequence else 10 + (24 + scores) / t)
    selective = s * b * h * (34 / t if sequence else 10 + 24 / t)
    assert layer_activations(sizes, "none") == pytest.approx(none)
    assert layer_activations(sizes, "selective") == pytest.approx(selective)
    assert layer_activations(sizes, "full") == 2 * s * b * h / (t if sequence else 1)


@pytest.mark.parametrize("pp", [1, 2, 4, 7])
def test_ranks_of_a_pipeline_hold_the_model(pp: int) -> None:
    layout = MeshLayout(pp=pp)
    held = sum(rank_parameters(MODEL, layout, rank) for rank in range(pp))
    copy = MODEL.vocab * MODEL.hidden if pp > 1 else 0  # of the tied table, for the head
    assert held == MODEL.parameters + copy


@given(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 3, 9]),
    st.sampled_from(["none", "selective", "full"]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_each_stage_of_zero_holds_less(tp: int, shards: int, pp: int, recompute: str) -> None:
    base = MeshLayout(tp=tp, pp=pp, dp_shard=shards, recompute=recompute, grad_bytes=2)  # type: ignore
    held = [memory(MODEL, replace(base, zero=zero), 8 * shards, 512).state for zero in (0, 1, 2, 3)]
    if shards > 1:
        layer = MODEL.layer_parameters / tp
        ends = MODEL.embedding_parameters + MODEL.head_parameters if pp == 1 else 0
        held[2] -= (2 + 2) * layer
        held[3] -= (2 + 2) * layer + 2 * (2 * layer + ends / tp)
    assert held[0] >= held[1] >= held[2] >= held[3]


@given(st.integers(1, 8), st.sampled_from(["none", "selective", "full"]))
@settings(max_examples=20, deadline=None)
def test_more_micro_batch_and_less_recomputation_hold_more(micro: int, recompute: str) -> None:
    layout = MeshLayout(micro_batch=micro, recompute=recompute)  # type: ignore
    more = replace(layout, micro_batch=micro + 1)
    few, many = (memory(MODEL, each, each.micro_batch, 512).activations for each in (layout, more))
    assert few < many
    none = replace(layout, recompute="none")
    assert layer_activations(RankSizes(MODEL, layout, 512), recompute) <= layer_activations(
        RankSizes(MODEL, none, 512), "none"
    )
