"""Each pass off, and each build of the kernels: the same numbers, dropout off and on.

Off, the law of same numbers holds against eager. On, masks are functions of coordinates, so that
gradients differ from those with everything on by the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_parity import SEEDS, assert_law
from tiny import Tensors, batch, bert, gpt2, gradients, gradients_of

from onward.rewrite import FORWARD, STEP

MAKERS = {"gpt2": gpt2, "bert": bert}
NAMES = sorted({p.name for p in (*FORWARD, *STEP)})
FUSIONS = tuple(p.name for p in (*FORWARD, *STEP) if p.needs)


@pytest.fixture(scope="module", params=list(MAKERS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def everything(kind: str) -> Tensors:
    """Gradients with dropout, all passes on."""
    return gradients(MAKERS[kind](dropout=0.3), DATA)


DATA = batch(4, 12, "right", ignored=True)
BATCHES = [batch(4, 12, "right", ignored=True, seed=seed) for seed in SEEDS]


def assert_near(ours: Tensors, theirs: Tensors) -> None:
    """Equal within a few roundings of the largest gradient of a tensor."""
    for name, y in theirs.items():
        size = float(y.abs().max())
        torch.testing.assert_close(
            ours[name], y, rtol=0, atol=3e-6 * size + 2e-8, msg=lambda m, name=name: f"{name}: {m}"
        )


def check(kind: str, everything: Tensors, disable: tuple[str, ...] = ()) -> None:
    still = MAKERS[kind](dropout=0.0)
    assert_law(still, BATCHES, gradients_of(still, BATCHES, disable=disable))
    assert_near(gradients(MAKERS[kind](dropout=0.3), DATA, disable=disable), everything)


@pytest.mark.parametrize("name", NAMES)
def test_without_one_pass(kind: str, everything: Tensors, name: str) -> None:
    check(kind, everything, (name,))


def test_without_any_fusion(kind: str, everything: Tensors) -> None:
    check(kind, everything, FUSIONS)


@pytest.mark.parametrize("level", ["0", "plain"])
def test_on_other_builds(
    kind: str, everything: Tensors, level: str, build: Callable[[str], None]
) -> None:
    build(level)
    check(kind, everything)
