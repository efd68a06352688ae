"""Any order of changes and calls: what an accelerated model shows is what eager PyTorch shows."""

from __future__ import annotations

import warnings

import pytest
import torch
from histories import Differs, run
from history_sides import ACTIONS, MUTATIONS, Step
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.module.states import States

CALLS = ("forward", "step", "lost", "written", "backward", "together", "zero", "update")
NUMBERS = st.integers(0, 511)
HISTORIES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(CALLS), NUMBERS),
        st.tuples(st.sampled_from(sorted(ACTIONS)), NUMBERS),
    ),
    min_size=4,
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=20)
@given(HISTORIES)
def test_any_order_of_changes_and_calls(history: list[Step]) -> None:
    told = run(history)
    assert all(": " in text for text in told)


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", range(32))
def test_every_kind_of_call_twice_with_another_between(kind: int) -> None:
    steps = [("step", kind), ("forward", kind + 32), ("lost", (kind + 7) % 32), ("forward", kind)]
    run([*steps, ("backward", 3), ("together", 0), ("zero", kind), ("step", kind)])


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_change_between_two_steps(name: str) -> None:
    """With each of its first nine details, one after the other."""
    history: list[Step] = [("step", 0)]
    for k in range(9):
        history += [(name, k), ("step", 0), ("zero", 1)]
    run(history)


@pytest.mark.parametrize("mode", range(8))
def test_every_surrounding(mode: int) -> None:
    run([("step", 0), ("surroundings", mode), ("step", 1), ("surroundings", 0), ("step", 1)])


def test_reasons_are_told_once() -> None:
    """One is met here, many times, in two surroundings."""
    steps: list[Step] = [("hook", 0), ("surroundings", 3), *[("step", k) for k in (0, 1, 0)]]
    told = run([*steps, ("surroundings", 0), *[("step", k) for k in (0, 1, 0)]])
    assert len(told) == 1
    assert "forward pre-hook" in told[0]


def test_a_stale_graph_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The histories themselves: with guards that see nothing, they fail."""

    def first(self: States, model: torch.nn.Module) -> object:
        return next(iter(self), None) or plain(self, model)

    plain = States.now
    monkeypatch.setattr(States, "now", first)
    with pytest.raises(Differs), warnings.catch_warnings():
        run([("step", 0), ("attribute", 28), ("step", 0)])
