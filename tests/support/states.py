"""Saved states: whether two are equal, and that those that do not fit are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from onward import OnwardError


def alike(a: Any, b: Any) -> bool:
    """Equal, every tensor to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def assert_refused(
    trainer: Any, good: dict[str, Any], spoilt: Mapping[str, Callable[[dict[str, Any]], Any]]
) -> None:
    """A Trainer refuses each of the spoilt copies of a state in one line, and stays as it was."""
    before = trainer.state_dict()
    for name, spoil in spoilt.items():
        state = copy.deepcopy(good)
        spoil(state)
        with pytest.raises(OnwardError, match="the state_dict does not fit") as raised:
            trainer.load_state_dict(state)
        assert "\n" not in str(raised.value), name
        assert alike(trainer.state_dict(), before), name
