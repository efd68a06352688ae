"""Published steps of Megatron-LM: rows A and B of published_steps.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from onward.simulate import MeshLayout, Transformer
from suite.published_row import (
    FIT,
    HELD,
    SHAPE,
    PublishedMemory,
    PublishedStep,
    megatron_flops,
    scheduled,
)

# ---- A

_MEGATRON = MeshLayout(
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

# Software of 2022: Megatron-LM had options by then that switch asynchronous all-reduces of tensor
# parallelism, and the fusion of gradient accumulation, off.
_B_FULL = replace(_MEGATRON, grad_bytes=4, overlap_backward=True, fused_accumulation=True)
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


def _b() -> Iterator[PublishedStep]:
    for name, model, p, chunks, batch, micro, full, selective in _TABLE_5:
        for base, seconds in ((_B_FULL, full), (_B_SELECTIVE, selective)):
            layout = scheduled(replace(base, tp=8, pp=p, micro_batch=micro), chunks)
            yield PublishedStep(
                "B", f"{name}, {8 * p} GPUs, {base.recompute}", HELD, "a100-80", model, layout,
                batch, 2048, seconds, f"{seconds} s",
            )  # fmt: skip
    layout = scheduled(replace(_B_SELECTIVE, tp=8, pp=35, dp_replicate=8), 3)
    seconds = 37.83 * 56.0 / 54.2
    yield PublishedStep(
        "B", "530 B, 2240 GPUs, selective", HELD, "a100-80", _GPT_530, layout, 2240, 2048, seconds,
        "54.2 % MFU", False,
    )  # fmt: skip


# model, pp, chunks, batch, micro-batch, GiB of state, of activations without and with sequence
# parallelism and selective recomputation
_FIGURE_1 = (
    ("22 B", _GPT_22, 1, 1, 4, 4, 45.5625, 59.25, 9.5625),
    ("175 B", _GPT_175, 8, 3, 64, 1, 45.5625, 66.84375, 12.3515625),
    ("530 B", _GPT_530, 35, 3, 280, 1, 31.640625, 114.0234375, 23.076171875),
    ("1 T", _GPT_1000, 64, 1, 512, 1, 32.958984375, 131.25, 26.5625),
)


def megatron_memory() -> Iterator[PublishedMemory]:
    """Memory by B's figure 1."""
    for name, model, p, chunks, batch, micro, state, none, selective in _FIGURE_1:
        plain = scheduled(replace(_B_FULL, tp=8, pp=p, micro_batch=micro, recompute="none"), chunks)
        small = replace(plain, recompute="selective", sequence_parallel=True)
        rest = ("B", name, "a100-80", model)
        yield PublishedMemory(*rest, plain, batch, 2048, "state", state)
        yield PublishedMemory(*rest, plain, batch, 2048, "activations", none)
        yield PublishedMemory(*rest, small, batch, 2048, "activations", selective)


def megatron_steps() -> Iterator[PublishedStep]:
    """Rows A and B."""
    yield from _a1()
    yield from _a2()
    yield from _b()


__all__ = ["megatron_memory", "megatron_steps"]
