"""One published figure of a training step: its time, or the memory of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from onward.simulate import MeshLayout, Transformer

FIT, HELD, SHAPE = "fit", "held out", "shape"


@dataclass(frozen=True)
class PublishedStep:
    """One published row. seconds: of a step, measured, as the row's figure says it (`figure`)."""

    group: str
    name: str
    half: str
    cluster: str
    model: Transformer
    layout: MeshLayout
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
    layout: MeshLayout
    batch: int
    tokens: int
    what: str
    gib: float
    exact: bool = True


def megatron_flops(model: Transformer, batch: int, tokens: int) -> float:
    """A's FLOPs of a step with full recomputation."""
    h, s, layers = model.hidden, tokens, model.layers
    return 96 * batch * s * layers * h * h * (1 + s / (6 * h) + model.vocab / (16 * layers * h))


def scheduled(layout: MeshLayout, chunks: int) -> MeshLayout:
    """The layout with so many stages of a rank, interleaved where there are several."""
    schedule = "Interleaved1F1B" if chunks > 1 else "1F1B"
    return replace(layout, chunks=chunks, schedule=schedule)


__all__ = [
    "FIT", "HELD", "SHAPE", "PublishedMemory", "PublishedStep", "megatron_flops", "scheduled",
]  # fmt: skip
