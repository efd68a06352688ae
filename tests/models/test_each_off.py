"""Each pass off, and each build of the kernels: the same numbers, dropout off and on.

Off, the law of same numbers holds against eager. On, masks are functions of coordinates, so that
gradients differ from those with everything on by the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_parity import SEEDS, Law, assert_within, law_of
from tiny import Tensors, batch, bert, gpt2, gradients, gradients_of

from onward.rewrite import FORWARD, STEP, FusionPass

pytestmark = pytest.mark.usefixtures("captures_kept")  # a capture depends on no pass

MAKERS = {"gpt2": gpt2, "bert": bert}
NAMES = sorted({p.name for p in (*FORWARD, *STEP)})
FUSIONS = tuple(p.name for p in (*FORWARD, *STEP) if isinstance(p, FusionPass))


@pytest.fixture(scope="module", params=list(MAKERS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass
class Given:
    """What every case is about. `law`: of the still model; everything: gradients of the other."""

    still: Any
    dropping: Any
    law: Law
    everything: Tensors


@pytest.fixture(scope="module")
def given(kind: str) -> Given:
    still, dropping = MAKERS[kind](dropout=0.0), MAKERS[kind](dropout=0.3)
    return Given(still, dropping, law_of(still, BATCHES), gradients(dropping, DATA))


DATA = batch(4, 12, "right", ignored=True)
BATCHES = [batch(4, 12, "right", ignored=True, seed=seed) for seed in SEEDS]


def assert_near(ours: Tensors, theirs: Tensors) -> None:
    """Equal within a few roundings of the largest gradient of a tensor."""
    for name, y in theirs.items():
        size = float(y.abs().max())
        torch.testing.assert_close(
            ours[name], y, rtol=0, atol=3e-6 * size + 2e-8, msg=lambda m, name=name: f"{name}: {m}"
        )


def check(given: Given, disable: tuple[str, ...] = ()) -> None:
    assert_within(given.law, BATCHES, gradients_of(given.still, BATCHES, disable=disable))
    assert_near(gradients(given.dropping, DATA, disable=disable), given.everything)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", NAMES)
def test_without_one_pass(given: Given, name: str) -> None:
    check(given, (name,))


def test_without_any_fusion(given: Given) -> None:
    check(given, FUSIONS)


@pytest.mark.sample(2)
@pytest.mark.parametrize("level", ["0", "plain"])
def test_on_other_builds(given: Given, level: str, build: Callable[[str], None]) -> None:
    build(level)
    check(given)
