"""Published times and memory of training steps, which the simulator is held against.

The split was written down before anything was fitted, and no row moves:

* FIT: of A's table 1 the rows 1, 3, 5, 7, 9; all of D.
* HELD: of A's table 1 the rows 2, 4, 6, 8, 10; the pipeline rows of A's table 2; all of B, C and E.
* SHAPE: A's ZeRO-3 rows (table 2) and F: curves that have to come out of the model. In no mean.

Sources: A, Narayanan et al. 2021 (arXiv 2104.04473, tables 1 and 2). B, Korthikanti et al. 2022
(arXiv 2205.05198, table 5; memory: figure 1, as digitized by calculon). C, torchtitan's pages
benchmarks/llama3_h100_202412 and asyncTP_llama3_h100_2025-06; the rows of fp8 are Float8 on that
page. D, the tables of llm-foundry's scripts/train/benchmarking. E, Llama Team 2024 (SC'24 slide). F,
the README of Megatron-LM.

`exact` is False where a shape or a figure is from memory, not read in the source. What a source does
not say (`free`) is chosen as its authors did, by speed: the fastest of these values that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onward.simulate import PRESETS, Layout, Transformer

FIT, HELD, SHAPE = "fit", "held out", "shape"


@dataclass(frozen=True)
class PublishedStep:
    """One published row. seconds: of a step, measured, as the row's figure says it (`figure`)."""

    group: str
    name: str
    half: str
    cluster: str
    model: Transformer
    layout: Layout
    batch: int
    tokens: int
    seconds: float
    figure: str
    exact: bool = True
    free: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class PublishedMemory:
    """One published figure of memory, in GiB of a device. what: "state", "activations", "total"."""

    group: str
    name: str
    cluster: str
    model: Transformer
    layout: Layout
    batch: int
    tokens: int
    what: str
    gib: float
    exact: bool = True


def megatron_flops(model: Transformer, batch: int, tokens: int) -> float:
    """A's FLOPs of a step with full recomputation."""
    h, s, layers = model.hidden, tokens, model.layers
    return (
        96 * batch * s * layers * h * h * (1 + s / (6 * h) + model.vocab / (16 * layers * h))
    )


# ---- A

_MEGATRON = Layout(
    attention="written out", dropout=True, overlap=False, recompute="full", grad_bytes=2
)
# parameters in billions, heads, hidden, layers, tp, pp, GPUs, batch, TFLOP/s, shape read in source
_TABLE_1 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137, True),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138, False),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142, False),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, True),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, False),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, False),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, True),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, True),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, True),
    (1008, 160, 25600, 128, 8, 64, 3072, 3072, 163, False),
)
_GPT_175 = Transformer(12288, 96, 96, 51200)
_GPT_530 = Transformer(20480, 105, 128, 51200)


def _a1() -> Iterator[PublishedStep]:
    for number, (size, a, h, layers, t, p, n, batch, tflops, exact) in enumerate(_TABLE_1, 1):
        model = Transformer(h, layers, a, 51200)
        layout = replace(_MEGATRON, tp=t, pp=p, dp_replicate=n // (t * p))
        chunks = tuple(v for v in (1, 2, 3, 4) if p > 1 and layers % (p * v) == 0) or (1,)
        yield PublishedStep(
            "A1", f"{size} B, {n} GPUs", FIT if number % 2 else HELD, "a100-80", model, layout,
            batch, 2048, megatron_flops(model, batch, 2048) / (n * tflops * 1e12),
            f"{tflops} TFLOP/s", exact, {"micro_batch": (1, 2, 4, 8), "chunks": chunks},
        )  # fmt: skip


def _a2() -> Iterator[PublishedStep]:
    # GPUs, batch, TFLOP/s; ZeRO-3 with micro-batches of 4, 2, 1
    zero = {
        "174.6 B": (_GPT_175, ((384, 1536, 144), (768, 1536, 88), (1536, 1536, 44))),
        "529.6 B": (_GPT_530, ((640, 2560, 138), (1120, 2240, 98), (2240, 2240, 48))),
    }
    # A layer of these has more than 10^9 parameters, DeepSpeed's default of what stays gathered, so
    # that a recomputation's weights are freed and gathered again. Its rings go through one adapter
    # each: with those of eight the model has no fall at all.
    zero_3 = replace(_MEGATRON, zero=3, overlap=True, one_adapter=True, free_early=True)
    for name, (model, rows) in zero.items():
        for micro, (n, batch, tflops) in zip((4, 2, 1), rows, strict=True):
            yield PublishedStep(
                "A2 ZeRO-3", f"{name}, {n} GPUs", SHAPE, "a100-80", model,
                replace(zero_3, dp_shard=n, micro_batch=micro), batch, 2048,
                megatron_flops(model, batch, 2048) / (n * tflops * 1e12), f"{tflops} TFLOP/s",
                False,
            )  # fmt: skip
    pipelined = {
        "174.6 B": (_GPT_175, 12, 1536, ((384, 153), (768, 149), (1536, 141))),
        "529.6 B": (_GPT_530, 35, 2240, ((560, 171), (1120, 167), (2240, 159))),
    }
    for name, (model, p, batch, rows) in pipelined.items():
        for n, tflops in rows:
            layout = replace(_MEGATRON, tp=8, pp=p, dp_replicate=n // (8 * p))
            chunks = tuple(v for v in (1, 2, 3, 4) if model.layers % (p * v) == 0)
            yield PublishedStep(
                "A2 pipeline", f"{name}, {n} GPUs", HELD, "a100-80", model, layout, batch, 2048,
                megatron_flops(model, batch, 2048) / (n * tflops * 1e12), f"{tflops} TFLOP/s",
                False, {"micro_batch": (1, 2), "chunks": chunks},
            )  # fmt: skip


# ---- B

_B_FULL = replace(_MEGATRON, grad_bytes=4)
_B_SELECTIVE = replace(_B_FULL, recompute="selective", sequence_parallel=True)
_GPT_22 = Transformer(6144, 48, 64, 51200)
_GPT_1000 = Transformer(25600, 128, 160, 51200)
# model, pp, chunks, batch, micro-batch, seconds with full recomputation and with selective
_TABLE_5 = (
    ("22 B", _GPT_22, 1, 1, 4, 4, 1.42, 1.10),
    ("175 B", _GPT_175, 8, 3, 64, 1, 18.13, 13.75),
    ("530 B", _GPT_530, 35, 3, 280, 1, 49.05, 37.83),
    ("1 T", _GPT_1000, 64, 1, 512, 1, 94.42, 71.49),
)


def _scheduled(layout: Layout, chunks: int) -> Layout:
    schedule = "Interleaved1F1B" if chunks > 1 else "1F1B"
    return replace(layout, chunks=chunks, schedule=schedule)


def _b() -> Iterator[PublishedStep]:
    for name, model, p, chunks, batch, micro, full, selective in _TABLE_5:
        for base, seconds in ((_B_FULL, full), (_B_SELECTIVE, selective)):
            layout = _scheduled(replace(base, tp=8, pp=p, micro_batch=micro), chunks)
            yield PublishedStep(
                "B", f"{name}, {8 * p} GPUs, {base.recompute}", HELD, "a100-80", model, layout,
                batch, 2048, seconds, f"{seconds} s",
            )  # fmt: skip
    layout = _scheduled(replace(_B_SELECTIVE, tp=8, pp=35, dp_replicate=8), 3)
    seconds = 37.83 * 56.0 / 54.2
    yield PublishedStep(
        "B", "530 B, 2240 GPUs, selective", HELD, "a100-80", _GPT_530, layout, 2240, 2048, seconds,
        "54.2 % MFU", False,
    )  # fmt: skip


# ---- C

_TITAN = Layout(zero=3, sequence_parallel=True)
_8B, _70B, _405B = (PRESETS[f"llama3-{size}"] for size in ("8b", "70b", "405b"))


def _titan() -> Iterator[tuple[str, Transformer, Layout, int, int, float, float]]:
    """Name, model, layout, batch, tokens, tokens/s of a GPU, GiB (0: not given)."""
    selective = replace(_TITAN, micro_batch=2, recompute="selective")
    for n, rows in ((8, ((5762, 82.4), (6667, 77.0))), (128, ((5605, 67.0), (6514, 62.0)))):
        for (rate, gib), fused in zip(rows, (False, True), strict=True):
            layout = replace(selective, dp_shard=n, fused=fused)
            word = "compiled" if fused else "eager"
            yield f"8B, {n} GPUs, {word}", _8B, layout, 2 * n, 8192, rate, gib
    full = replace(_TITAN, recompute="full", dtype="fp8")
    for cp, rate, gib in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5)):
        layout = replace(full, dp_shard=8 // cp, cp=cp)
        name = f"8B, 8 GPUs, cp {cp}, fp8"
        yield name, _8B, layout, 8 // cp, 32768 * cp, rate, gib
    two = replace(full, dp_shard=32, tp=8, micro_batch=16)
    yield "70B, 256 GPUs, fp8", _70B, two, 512, 8192, 829, 71.9
    yield "70B, 256 GPUs, fp8, async", _70B, replace(two, overlap_tp=True), 512, 8192, 876, 67.6
    # a pipeline's ranks keep weights gathered, and reduce gradients once: ZeRO-1's traffic. The
    # number of micro-batches is torchtitan's default, that of the ranks of the pipeline.
    three = replace(full, zero=1, dp_shard=8, tp=8, pp=8, micro_batch=4, overlap_tp=True)
    yield "405B, 512 GPUs, fp8, 1F1B", _405B, three, 256, 8192, 100, 82.5
    name = "405B, 512 GPUs, fp8, interleaved"
    yield name, _405B, _scheduled(three, 2), 256, 8192, 128, 72.7
    for cp, rate, gib in ((1, 76, 75.3), (2, 47, 75.9), (4, 31, 77.1), (8, 16, 84.9)):
        layout = replace(three, dp_shard=8 // cp, cp=cp, micro_batch=1)
        name = f"405B, 512 GPUs, fp8, cp {cp}"
        yield name, _405B, layout, 64 // cp, 32768 * cp, rate, gib
    plain = replace(two, dtype="bf16")
    yield "70B, 256 GPUs", _70B, plain, 512, 8192, 597, 0
    yield "70B, 256 GPUs, async", _70B, replace(plain, overlap_tp=True), 512, 8192, 652, 0
    small = replace(_TITAN, dp_shard=8, tp=8, micro_batch=12, recompute="selective")
    yield "8B, 64 GPUs, tp 8", _8B, small, 96, 8192, 4378, 0
    yield "8B, 64 GPUs, tp 8, async", _8B, replace(small, overlap_tp=True), 96, 8192, 4809, 0


def _c() -> Iterator[PublishedStep]:
    for name, model, layout, batch, tokens, rate, _ in _titan():
        yield PublishedStep(
            "C", name, HELD, "h100-500w", model, layout, batch, tokens,
            batch * tokens / (rate * layout.ranks), f"{rate} tokens/s",
        )  # fmt: skip


# ---- D

_MPT: Mapping[str, Transformer] = {
    "70B": Transformer(8192, 80, 64, 50368),
    "30B": Transformer(7168, 48, 56, 50368),
    "13B": Transformer(5120, 40, 40, 50368),
    "7B": Transformer(4096, 32, 32, 50368),
    "3B": Transformer(2560, 32, 20, 50368),
    "1B": Transformer(2048, 24, 16, 50368),
}
_FOUNDRY = Layout(zero=3, fused=False, grad_bytes=2)
# cluster, model, GPUs, micro-batch, micro-batches, tokens/s of a GPU, recomputes, gathers fp32
# (mixed precision DEFAULT gathers fp32 and casts, PURE gathers bf16)
_TABLE_D = (
    ("h100", "70B", 64, 8, 4, 1039, True, True),
    ("h100", "70B", 32, 2, 16, 882, True, True),
    ("h100", "30B", 32, 14, 3, 2308, True, True),
    ("h100", "30B", 16, 10, 3, 2263, True, True),
    ("h100", "30B", 8, 3, 21, 2002, True, True),
    ("h100", "13B", 64, 2, 1, 4800, False, True),
    ("h100", "13B", 32, 2, 1, 4811, False, True),
    ("h100", "13B", 16, 2, 1, 4767, False, True),
    ("h100", "13B", 8, 2, 1, 4792, False, True),
    ("h100", "7B", 8, 6, 1, 10643, False, True),
    ("h100", "3B", 64, 6, 3, 22525, False, True),
    ("h100", "3B", 32, 6, 3, 23021, False, True),
    ("h100", "3B", 16, 10, 3, 24142, False, True),
    ("h100", "1B", 64, 20, 1, 44402, False, True),
    ("h100", "1B", 32, 20, 1, 45130, False, True),
    ("h100", "1B", 16, 20, 1, 46037, False, True),
    ("h100", "1B", 8, 14, 1, 45455, False, True),
    ("a100-80", "70B", 64, 8, 4, 410, True, False),
    ("a100-80", "7B", 8, 6, 2, 4641, False, True),
    ("a100-40", "7B", 128, 18, 1, 3623, True, False),
    ("a100-40", "7B", 64, 18, 1, 3665, True, False),
    ("a100-40", "7B", 32, 18, 1, 3725, True, False),
    ("a100-40", "7B", 16, 16, 1, 3645, True, False),
    ("a100-40", "7B", 8, 12, 4, 3679, True, False),
)


def _d() -> Iterator[PublishedStep]:
    for cluster, size, n, micro, count, rate, recomputes, wide in _TABLE_D:
        layout = replace(
            _FOUNDRY, dp_shard=n, micro_batch=micro, gather_bytes=4 if wide else 2,
            recompute="full" if recomputes else "none",
        )  # fmt: skip
        yield PublishedStep(
            "D", f"{cluster}, {size}, {n} GPUs", FIT, cluster, _MPT[size], layout,
            n * micro * count, 2048, micro * count * 2048 / rate, f"{rate} tokens/s",
        )  # fmt: skip


# ---- E and F


def _causal_flops(model: Transformer, batch: int, tokens: int) -> float:
    """FLOPs of a step of which attention needs half of its pairs. It is not said which FLOPs E
    counts; these are those that run."""
    half = 3 * model.layers * 2 * float(batch) * tokens * tokens * model.hidden
    return model.step_flops(batch, tokens) - half


def _e() -> Iterator[PublishedStep]:
    base = Layout(zero=1, tp=8, pp=16, sequence_parallel=True, grad_bytes=4)
    free = {"chunks": (1, 2, 4, 8), "recompute": ("none", "selective", "full")}
    # GPUs, cp, tokens, samples, TFLOP/s
    for n, cp, tokens, batch, tflops in (
        (8192, 1, 8192, 2048, 430), (16384, 1, 8192, 2048, 400), (16384, 16, 131072, 128, 380),
    ):  # fmt: skip
        layout = replace(base, cp=cp, dp_shard=n // (128 * cp))
        yield PublishedStep(
            "E", f"405B, {n} GPUs, cp {cp}", HELD, "h100", _405B, layout, batch, tokens,
            _causal_flops(_405B, batch, tokens) / (n * tflops * 1e12), f"{tflops} TFLOP/s",
            False, free,
        )  # fmt: skip


def _f() -> Iterator[PublishedStep]:
    model = Transformer(12288, 96, 96, 131072, tokens=4096)
    base = Layout(zero=1, tp=8, pp=12, sequence_parallel=True, dropout=False)
    free = {"chunks": (1, 2, 4, 8), "recompute": ("none", "selective", "full")}
    for n, percent in ((96, 47), (4608, 42)):
        layout = replace(base, dp_shard=n // 96)
        seconds = model.step_flops(1152, 4096) / (n * percent / 100 * 989e12)
        yield PublishedStep(
            "F", f"175B, {n} GPUs", SHAPE, "h100", model, layout, 1152, 4096, seconds,
            f"{percent} % MFU", False, free,
        )  # fmt: skip


STEPS: tuple[PublishedStep, ...] = (*_a1(), *_a2(), *_b(), *_c(), *_d(), *_e(), *_f())


# ---- memory

# model, pp, chunks, batch, micro-batch, GiB of state, of activations without and with sequence
# parallelism and selective recomputation
_FIGURE_1 = (
    ("22 B", _GPT_22, 1, 1, 4, 4, 45.5625, 59.25, 9.5625),
    ("175 B", _GPT_175, 8, 3, 64, 1, 45.5625, 66.84375, 12.3515625),
    ("530 B", _GPT_530, 35, 3, 280, 1, 31.640625, 114.0234375, 23.076171875),
    ("1 T", _GPT_1000, 64, 1, 512, 1, 32.958984375, 131.25, 26.5625),
)


def _memory() -> Iterator[PublishedMemory]:
    for name, model, p, chunks, batch, micro, state, none, selective in _FIGURE_1:
        plain = _scheduled(
            replace(_B_FULL, tp=8, pp=p, micro_batch=micro, recompute="none"), chunks
        )
        small = replace(plain, recompute="selective", sequence_parallel=True)
        rest = ("B", name, "a100-80", model)
        yield PublishedMemory(*rest, plain, batch, 2048, "state", state)
        yield PublishedMemory(*rest, plain, batch, 2048, "activations", none)
        yield PublishedMemory(*rest, small, batch, 2048, "activations", selective)
    for name, model, layout, batch, tokens, _, gib in _titan():
        if gib:
            yield PublishedMemory(
                "C", name, "h100-500w", model, layout, batch, tokens, "total", gib
            )


MEMORY: tuple[PublishedMemory, ...] = tuple(_memory())

__all__ = [
    "FIT", "HELD", "MEMORY", "SHAPE", "STEPS", "PublishedMemory", "PublishedStep", "megatron_flops",
]  # fmt: skip
