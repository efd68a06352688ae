"""Parameters come and go: what is done to model and optimizer, in every order, as in eager."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from pairs import KINDS, MicroPair
from torch import nn

pytestmark = pytest.mark.usefixtures("captures_kept")


def take_out(model: Any, o: Any) -> None:
    """The optimizer keeps the state of what it does not hold any more."""
    p = model[0].weight
    for group in o.param_groups:
        group["params"] = [q for q in group["params"] if q is not p]


def put_in(model: Any, o: Any) -> None:
    held = {p for g in o.param_groups for p in g["params"]}
    missing = [p for p in model.parameters() if p not in held]
    if missing:
        o.add_param_group({"params": missing})


def exchange_weight(model: Any, o: Any) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)


def exchange_module(model: Any, o: Any) -> None:
    model[2] = copy.deepcopy(model[2])


def freeze_one(model: Any, o: Any) -> None:
    model[0].weight.requires_grad_(not model[0].weight.requires_grad)


def forget(model: Any, o: Any) -> None:
    o.state.pop(model[0].weight, None)


COMINGS = [take_out, put_in, exchange_weight, exchange_module, freeze_one, forget]


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "acts",
    list(itertools.permutations(COMINGS, 3)),
    ids=lambda acts: "-".join(a.__name__ for a in acts),
)
def test_parameters_come_and_go_as_in_eager(acts: tuple[Any, ...], kind: str) -> None:
    pair = MicroPair(KINDS[kind])
    pair.steps(1)
    for act in acts:
        act(pair.model, pair.ours)
        act(pair.twin, pair.theirs)
        # a module's copy has gradients of its own, of which the plain loop knows nothing
        pair.theirs.zero_grad()
        pair.twin.zero_grad()
        if not {p for g in pair.ours.param_groups for p in g["params"]} & set(
            pair.model.parameters()
        ):
            return  # nothing is left to train
        pair.steps(2)
        pair.assert_alike()
