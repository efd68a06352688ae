"""Traces that leave out what nobody reads: the same graph, and torch's cache serves deep models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
from torch._subclasses.fake_tensor import FakeTensorMode

from onward.capture import CaptureRequest, capture
from onward.capture.trace import export as trace
from onward.graph.printer import graph_text

MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: tiny.gpt2(layers=2),
    "GPT-2, 6 layers": lambda: tiny.gpt2(layers=6),
    "BERT": tiny.bert,
}


def nothing() -> Iterator[Any]:
    return iter(())


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = MODELS[name](), tiny.batch()
    cheap = graph_text(capture(CaptureRequest(model, (), batch)).graph)
    monkeypatch.setattr(trace, "cheaper", nothing)
    assert graph_text(capture(CaptureRequest(model, (), batch)).graph) == cheap


def test_the_third_layer_finds_what_the_second_has_left() -> None:
    """Each layer more is served by entries, and makes few."""
    served, made = [], []
    for layers in (6, 7):
        hits, misses = FakeTensorMode.cache_hits, FakeTensorMode.cache_misses
        capture(CaptureRequest(tiny.gpt2(layers=layers), (), tiny.batch()))
        served.append(FakeTensorMode.cache_hits - hits)
        made.append(FakeTensorMode.cache_misses - misses)
    more, new = served[1] - served[0], made[1] - made[0]
    assert more > 10 and new < more / 4
