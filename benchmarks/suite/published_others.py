"""Published steps of other systems: rows C, D, E and F of published_steps.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from onward.simulate import PRESETS, MeshLayout, Transformer
from suite.published_row import (
    FIT,
    HELD,
    SHAPE,
    PublishedMemory,
    PublishedStep,
    scheduled,
)

# ---- C

# FSDP2 copies what it has gathered; blocks are compiled, and the loss behind them is not; a product
# keeps its gathered input
_TITAN = MeshLayout(
    zero=3, sequence_parallel=True, gathers_again=False, copies_gathered=True, fused_loss=False
)
_8B, _70B, _405B = (PRESETS[f"llama3-{size}"] for size in ("8b", "70b", "405b"))


def _titan() -> Iterator[tuple[str, Transformer, MeshLayout, int, int, float, float]]:
    """Name, model, layout, batch, tokens, tokens/s of a GPU, GiB (0: not given)."""
    selective = replace(_TITAN, micro_batch=2, recompute="selective")
    for n, rows in ((8, ((5762, 82.4), (6667, 77.0))), (128, ((5605, 67.0), (6514, 62.0)))):
        for (rate, gib), fused in zip(rows, (False, True), strict=True):
            layout = replace(selective, dp_shard=n, fused=fused)
            word = "compiled" if fused else "eager"
            yield f"8B, {n} GPUs, {word}", _8B, layout, 2 * n, 8192, rate, gib
    # the model repeats keys to all heads, which torch's context_parallel then passes round
    full = replace(_TITAN, recompute="full", dtype="fp8", repeat_keys=True, ring=True)
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
    yield name, _405B, scheduled(three, 2), 256, 8192, 128, 72.7
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
_FOUNDRY = MeshLayout(zero=3, fused=False, grad_bytes=2, attention="flash-1")
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


def _e() -> Iterator[PublishedStep]:
    base = MeshLayout(zero=1, tp=8, pp=16, sequence_parallel=True, grad_bytes=4)
    free = {"chunks": (1, 2, 4, 8), "recompute": ("none", "selective", "full")}
    # GPUs, cp, tokens, samples, TFLOP/s
    for n, cp, tokens, batch, tflops in (
        (8192, 1, 8192, 2048, 430), (16384, 1, 8192, 2048, 400), (16384, 16, 131072, 128, 380),
    ):  # fmt: skip
        layout = replace(base, cp=cp, dp_shard=n // (128 * cp))
        yield PublishedStep(
            "E", f"405B, {n} GPUs, cp {cp}", HELD, "h100", _405B, layout, batch, tokens,
            _405B.step_flops(batch, tokens) / (n * tflops * 1e12), f"{tflops} TFLOP/s",
            False, free,
        )  # fmt: skip


def _f() -> Iterator[PublishedStep]:
    model = Transformer(12288, 96, 96, 131072, tokens=4096)
    # the page names what is overlapped: exchanges of gradients, weights, tensors and pipelines
    base = MeshLayout(
        zero=1, tp=8, pp=12, sequence_parallel=True, overlap_tp=True, overlap_backward=True,
        fused_accumulation=True,
    )  # fmt: skip
    free = {"chunks": (1, 2, 4, 8), "recompute": ("none", "selective", "full")}
    for n, percent in ((96, 47), (4608, 42)):
        layout = replace(base, dp_shard=n // 96)
        seconds = model.step_flops(1152, 4096) / (n * percent / 100 * 989e12)
        yield PublishedStep(
            "F", f"175B, {n} GPUs", SHAPE, "h100", model, layout, 1152, 4096, seconds,
            f"{percent} % MFU", False, free,
        )  # fmt: skip


def other_steps() -> Iterator[PublishedStep]:
    """Rows C, D, E and F."""
    yield from _c()
    yield from _d()
    yield from _e()
    yield from _f()


def other_memory() -> Iterator[PublishedMemory]:
    """Memory by C's tables."""
    for name, model, layout, batch, tokens, _, gib in _titan():
        if gib:
            yield PublishedMemory(
                "C", name, "h100-500w", model, layout, batch, tokens, "total", gib
            )


__all__ = ["other_memory", "other_steps"]
