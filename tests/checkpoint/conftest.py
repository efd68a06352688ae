"""Where no test takes the power away, nothing has to be on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_disk(request: pytest.FixtureRequest) -> Iterator[None]:
    """fsync does nothing, but in the tests of what a save leaves at each moment."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.name.endswith("test_kills.py"):
            patch.setattr(os, "fsync", lambda handle: None)
        yield
