"""Scores as numbers: what they are made of, and how they are shown."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """exp of a loss in nats per token; finite where that is not."""
    return math.exp(min(loss, 700.0))


def score_number(value: float) -> str:
    """A score for a reader: `12.34`, `0.9123`."""
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"


__all__ = ["perplexity", "score_number"]
