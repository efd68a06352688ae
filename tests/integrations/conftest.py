"""What the tests beside other packages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hf_runs import quiet


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    with quiet():
        yield
