"""The choice of the engine that multiplies: by a table that is measured once and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onward.errors import OnwardError
from onward.kernels.blas import choice
from onward.kernels.blas.choice import SAMPLES, Rates, Shape, choose, fastest, rates
from onward.kernels.blas.engines import engines

FORWARD = Shape(1024, 2048, 512, False, False)
BACKWARD = Shape(1024, 512, 2048, False, True)


def table(other: Callable[[Shape], float]) -> Rates:
    """One engine with 100 GFLOP/s on every sample, and one with `other` of it."""
    return {shape: {"even": 100.0, "other": 100.0 * other(shape)} for shape in SAMPLES}


def chosen(rates: Rates, *shapes: Shape) -> str:
    return fastest(rates, shapes, ("even", "other"))


def test_an_engine_is_taken_where_operands_are_stored_as_it_likes_them() -> None:
    found = table(lambda s: 1.1 if s.tb else 0.8)
    assert chosen(found, BACKWARD) == "other"
    assert chosen(found, FORWARD) == "even"


def test_less_than_the_margin_is_noise() -> None:
    assert chosen(table(lambda s: 1.02 if s.tb else 0.9), BACKWARD) == "even"
    assert chosen(table(lambda s: 1.02), BACKWARD) == "other", "the best over all samples"


def test_near_samples_decide() -> None:
    small, large = Shape(64, 64, 64), Shape(4096, 4096, 4096)
    found = table(lambda s: 1.3 if s.m * s.n * s.k < 1e6 else 0.9)
    assert chosen(found, small) == "other"
    assert chosen(found, large) == "even"


def test_one_engine_for_several_products_is_the_best_for_their_sum() -> None:
    found = table(lambda s: 1.5 if s.tb else 0.9)
    assert chosen(found, FORWARD) == "even"
    assert chosen(found, FORWARD, BACKWARD) == "other"
    assert chosen(found, *[FORWARD] * 5, BACKWARD) == "even"


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    if not engines():
        pytest.skip("no engine beside torch's own")
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path))
    rates.cache_clear()
    yield tmp_path / "products"
    rates.cache_clear()


def test_the_table_is_measured_once_and_kept(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rates(1)
    assert set(found) == set(SAMPLES)
    names = {"torch", *engines()}
    assert all(set(rate) == names and min(rate.values()) > 0 for rate in found.values())
    (kept,) = empty_cache.iterdir()

    def again() -> Rates:
        raise AssertionError("measured again")

    monkeypatch.setattr(choice, "measure", again)
    rates.cache_clear()
    assert rates(1) == found
    rates.cache_clear()
    with pytest.raises(AssertionError, match="measured again"):
        rates(2)  # other threads, another table
    for damage in ("", "{}", json.dumps({"rates": [{"shape": [1, 1, 1], "gflops": {}}]})):
        kept.write_text(damage)
        rates.cache_clear()
        with pytest.raises(AssertionError, match="measured again"):
            rates(1)


def test_an_engine_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_BLAS", "eigen")
    with pytest.raises(OnwardError, match="ONWARD_BLAS=eigen is invalid; fix: one of torch"):
        choose(FORWARD)


def test_a_forced_engine_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", *engines()):
        monkeypatch.setenv("ONWARD_BLAS", name)
        assert choose(FORWARD) == name
