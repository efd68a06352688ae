"""A count of traces: each capture of a model calls `torch.export.export` once, or oftener."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class Exports:
    """Counts calls of torch.export.export. count: since the beginning, or since `taken`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._real = 0, torch.export.export
        monkeypatch.setattr(torch.export, "export", self._counted)

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._real(*args, **kwargs)

    def taken(self) -> int:
        """The count, which begins at 0 again."""
        found, self.count = self.count, 0
        return found


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Exports:
    return Exports(monkeypatch)
