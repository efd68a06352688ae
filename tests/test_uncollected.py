"""The garbage collector stays off until the last thread has left."""

from __future__ import annotations

import gc
from contextlib import ExitStack

import pytest

from onward.uncollected import uncollected


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_last_to_leave_starts_it(order: tuple[int, ...], enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        stacks = [ExitStack() for _ in order]
        for stack in stacks:
            stack.enter_context(uncollected())
        for left, number in enumerate(order, 1):
            stacks[number].close()
            assert gc.isenabled() == (enabled and left == len(order))
    finally:
        (gc.enable if before else gc.disable)()


def test_an_exception_starts_it() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled()
