"""Whole steps: published times, what must rise and fall with what, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.cli import main
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role
from onward.graph.types import parse_type
from onward.simulate import MeshLayout, Transformer, best_layouts, built_in, estimate, step
from onward.simulate.cluster import Failures
from onward.simulate.goodput import goodput, useful
from onward.simulate.launches import items_of, replayed, work_of
from onward.simulate.layout import spread
from onward.simulate.replay import Item
from onward.simulate.search import layouts
from onward.simulate.work import Work, work_seconds

A100 = built_in("a100-80")
SMALL = Transformer(512, 6, 8, 1000, tokens=256)

MEGATRON = MeshLayout(
    tp=8, attention="written out", dropout=True, overlap=False, recompute="full", grad_bytes=2
)


@pytest.mark.parametrize(("selective", "seconds"), [(False, 1.42), (True, 1.10)])
def test_published_steps_on_one_node(selective: bool, seconds: float) -> None:
    """22 B parameters on 8 A100 (Korthikanti et al., 2022, table 5)."""
    layout = replace(
        MEGATRON, micro_batch=4, grad_bytes=4, overlap_backward=True, fused_accumulation=True
    )
    if selective:
        layout = replace(layout, recompute="selective", sequence_parallel=True)
    found = estimate(Transformer(6144, 48, 64, 51200), layout, A100, 4, 2048)
    assert found.seconds == pytest.approx(seconds, rel=0.05)


def test_a_published_step_of_a_pipeline() -> None:
    """310 B parameters on 1,920 A100 at 155 TFLOP/s (Narayanan et al., 2021, table 1), a row that
    no constant was fitted to."""
    model = Transformer(16384, 96, 128, 51200)
    layout = replace(MEGATRON, pp=16, dp_replicate=15, chunks=3, schedule="Interleaved1F1B")
    seconds = model.step_flops(2160, 2048, recompute=True) / 1920 / 155e12
    assert estimate(model, layout, A100, 2160, 2048).seconds == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_layers_that_are_not_replayed_cost_what_they_would(
    zero: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Transformer(2048, 20, 16, 50000)
    layout = MeshLayout(zero=zero, overlap=overlap, recompute="full")
    layout = replace(layout, dp_shard=16) if zero else replace(layout, dp_replicate=16)
    few = estimate(model, layout, A100, 16).seconds
    monkeypatch.setattr(step, "_LAYERS", 20)
    assert few == pytest.approx(estimate(model, layout, A100, 16).seconds, rel=0.01)


def test_a_step_of_products_alone_takes_their_flops() -> None:
    """Nothing else costs where memory is infinitely fast and one rank trains."""
    ideal = replace(A100, device=replace(A100.device, memory_bandwidth=1e30))
    model = Transformer(8192, 8, 64, 51200)
    layout = MeshLayout(attention="written out", micro_batch=4)
    found = estimate(model, layout, ideal, 4, 2048)
    rate = A100.device.bf16 * A100.efficiency.gemm
    assert found.seconds == pytest.approx(model.step_flops(4, 2048) / rate, rel=0.01)
    assert found.mfu == pytest.approx(A100.efficiency.gemm, rel=0.01)


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([0, 1, 2, 3]))
@settings(max_examples=15, deadline=None)
def test_what_is_slower(tp: int, pp: int, zero: int) -> None:
    layout = MeshLayout(tp=tp, pp=pp, zero=zero, dp_shard=2)
    base = estimate(SMALL, layout, A100, 12)
    assert estimate(SMALL, layout, A100, 24).seconds > base.seconds
    assert estimate(SMALL, replace(layout, recompute="full"), A100, 12).seconds > base.seconds
    assert estimate(replace(SMALL, layers=12), layout, A100, 12).seconds > base.seconds
    for name in ("in_node", "across"):
        link = replace(getattr(A100, name), bandwidth=1e6, latency=1e-3)
        slow = replace(A100, **{name: link})
        assert estimate(SMALL, layout, slow, 12).seconds >= base.seconds
    fast = replace(A100, device=replace(A100.device, bf16=1e15, memory_bandwidth=1e13))
    assert estimate(SMALL, layout, fast, 12).seconds < base.seconds


@given(st.integers(1, 60), st.integers(1, 60))
def test_layers_are_spread(layers: int, stages: int) -> None:
    counts = spread(layers, stages)
    assert sum(counts) == layers and len(counts) == stages
    assert max(counts) - min(counts) <= 1
    assert counts[0] <= max(counts) and counts[-1] == min(counts)


@pytest.mark.parametrize(
    "layout",
    [
        MeshLayout(tp=3), MeshLayout(cp=3), MeshLayout(zero=4), MeshLayout(dp_shard=5),
        MeshLayout(pp=9), MeshLayout(chunks=2),
        MeshLayout(pp=2, chunks=2, schedule="Interleaved1F1B", micro_batch=8),
        MeshLayout(tp=0),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be(layout: MeshLayout) -> None:
    with pytest.raises(OnwardError, match="no layout for"):
        estimate(SMALL, layout, A100, 8)


# ---- search


def test_the_best_layouts_fit_and_no_other_that_is_tried_is_faster() -> None:
    model, h100 = Transformer(2048, 4, 16, 1000, tokens=512), built_in("h100")
    found = best_layouts(model, h100, 4, 8, most=3, recompute="none")
    assert len(found) == 3 and all(each.fits and each.layout.ranks == 4 for each in found)
    seconds = [each.seconds for each in found]
    assert seconds == sorted(seconds)
    every = [
        each
        for layout in layouts(model, h100, 4, 8, 512, {"recompute": "none"})
        if (each := estimate(model, layout, h100, 8)).fits
    ]
    assert seconds[0] <= 1.05 * min(each.seconds for each in every)


@pytest.mark.parametrize(
    "given",
    [
        {"tp": 4},
        {"dp_shard": 2, "zero": 3},
        {"dp_replicate": 2, "dp_shard": 2},
        {"pp": 2, "chunks": 4},
    ],
    ids=str,
)
def test_what_is_given_is_kept(given: dict[str, int]) -> None:
    model = Transformer(2048, 8, 16, 1000, tokens=512)
    for each in best_layouts(model, built_in("h100"), 8, 16, most=2, **given):
        assert {name: getattr(each.layout, name) for name in given} == given
        assert each.layout.ranks == 8


def test_the_smallest_layout_that_does_not_fit_is_told() -> None:
    with pytest.raises(OnwardError, match=r"the smallest needs [\d.]+ GiB"):
        best_layouts(Transformer(12288, 96, 96, 50257), A100, 8, 8)


# ---- goodput


def test_goodput_is_that_of_random_failures() -> None:
    """Daly's expectation against a run of 4,000 intervals with failures drawn at random."""
    random = np.random.default_rng(0)
    interval, checkpoint, mean, restart = 600.0, 60.0, 3000.0, 200.0
    passed = 0.0
    for _ in range(4000):
        while (fails := random.exponential(mean)) < interval + checkpoint:
            passed += fails
            while (again := random.exponential(mean)) < restart:  # it may fail in a restart too
                passed += again
            passed += restart
        passed += interval + checkpoint
    share = 4000 * interval / passed
    assert useful(interval, checkpoint, mean, restart) == pytest.approx(share, rel=0.02)


def test_the_interval_is_youngs_and_near_the_best() -> None:
    cluster = replace(A100, failures=Failures(100.0, 300.0, 1e9))
    run = goodput(estimate(SMALL, MeshLayout(dp_replicate=8), cluster, 8))
    assert run.between_failures == 100 * 3600
    assert run.interval == pytest.approx(math.sqrt(2 * run.checkpoint * run.between_failures))
    for factor in (0.5, 2.0):
        other = useful(run.interval * factor, run.checkpoint, run.between_failures, 300.0)
        assert other < run.share


def test_without_failures_all_is_good() -> None:
    calm = replace(A100, failures=Failures())
    assert goodput(estimate(SMALL, MeshLayout(), calm, 2)).share == 1.0


# ---- launches, and items from outside


def test_a_launch_is_its_flops_and_bytes() -> None:
    graph = Graph()
    a = graph.input("a", parse_type("f32[64,128]"), Role.BATCH)
    b = graph.input("b", parse_type("f32[128,256]"), Role.BATCH)
    node = Builder(graph).Gemm(a, b).producer()
    assert node is not None
    nbytes = 4 * (64 * 128 + 128 * 256 + 64 * 256)
    assert work_of(node) == Work(2.0 * 64 * 128 * 256, float(nbytes), "fp32")
    works = [work_of(node), work_of(node)]
    once = work_seconds(works[0], A100)
    items = items_of(works, A100)
    assert replayed(items) == pytest.approx(2 * once)
    items.append(Item("data", 5 * once, after=(0,)))
    assert replayed(items) == pytest.approx(6 * once)


# ---- the command


def test_the_command_prints_the_best_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "h100", "--model", "gpt2", "--ranks", "8", "--batch", "64", "--pp", "1"]
    assert main([*words, "--top", "2"]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("0.12 B parameters, batch 64 x 1024 tokens, 8 ranks of h100")
    assert head.split() == ["seconds", "MFU", "GiB", "tokens/s", "goodput", "layout"]
    assert len(rows) == 2
    assert main([*words, "--json", "--top", "1"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["seconds"] > 0 and 0 < found["mfu"] < 1 and 0 < found["goodput"] < 1
    assert found["layout"]["pp"] == 1


def test_the_command_takes_a_file_and_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "device: {bf16: 1e14, memory_bandwidth: 1e12, memory: 2e10, attention: 5e13, fp32: 1e13}\n"
        "in_node: {bandwidth: 1e11, latency: 1e-6}\nacross: {bandwidth: 1e10, latency: 1e-5}\n"
        "per_node: 2\n"
    )
    sizes = ["--hidden", "64", "--layers", "2", "--heads", "2", "--seq", "128", "--vocab", "100"]
    assert main(["simulate", str(path), *sizes, "--dtype", "fp32", "--batch", "4"]) == 0
    assert "2 ranks of two (2 a node), fp32" in capsys.readouterr().out
