"""Signals that come while a block of code makes them wait are all handled behind it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from onward import signals
from onward.signals import signals_wait


class Stop(Exception):
    """Raised by a handler, as Python's own raises KeyboardInterrupt."""


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that were handled: SIGINT's handler raises, SIGTERM's does not."""
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        seen.append(number)
        if number == signal.SIGINT:
            raise Stop

    before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    yield seen
    for number, held in before.items():
        signal.signal(number, held)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_all_are_handled_though_one_raises(first: int, handled: list[int]) -> None:
    other = signal.SIGTERM if first == signal.SIGINT else signal.SIGINT
    with pytest.raises(Stop), signals_wait():
        signal.raise_signal(first)
        signal.raise_signal(other)
        signal.raise_signal(first)
        assert not handled
    assert handled == [first, other]


@pytest.mark.parametrize("place", range(8))
def test_one_that_comes_while_handlers_are_given_back_disables_no_other(
    place: int, handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first raises before all handlers have their places; a later signal is heard still."""
    given, count = signal.signal, 0

    def interrupted(number: int, handler: Any) -> Any:
        nonlocal count
        before = given(number, handler)
        count += armed
        if count == place + 1 and armed:
            signal.raise_signal(signal.SIGINT)
        return before

    armed = False
    monkeypatch.setattr(signals.signal, "signal", interrupted)
    with pytest.raises(Stop):
        with signals_wait():
            armed = True
        raise Stop  # there are fewer handlers
    monkeypatch.undo()
    handled.clear()
    signal.raise_signal(signal.SIGTERM)
    assert handled == [signal.SIGTERM]


def test_one_that_comes_twice_is_handled_at_once_where_it_may_insist(handled: list[int]) -> None:
    """Code that never ends can be interrupted."""
    reached = []
    with pytest.raises(Stop), signals_wait(insistent=True):
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        signal.raise_signal(signal.SIGINT)
        reached.append(2)
    assert reached == [1] and handled.count(signal.SIGINT) == 2
