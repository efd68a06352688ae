"""Services that are down, slow, full or broken, and what is made of one that is not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from onward.reporting import services
from onward.reporting.record import End, ReportRecord, ReportSetup
from onward.reporting.services import ReportService

LONG = 30.0  # seconds that no test takes unless something is wrong


class FakeService:
    """A service that notes what it gets.

    before: called before each record is taken, with the number of the call from 1; it may raise,
    wait or sleep. opening: likewise at each `open`.
    """

    def __init__(
        self,
        before: Callable[[int], None] = lambda call: None,
        opening: Callable[[int], None] = lambda call: None,
    ) -> None:
        self.records: list[ReportRecord] = []
        self.opened = self.calls = 0
        self.ends: list[End] = []
        self.setups: list[ReportSetup] = []
        self.threads: set[int] = set()
        self._before, self._opening = before, opening

    def writer(self, setup: ReportSetup) -> FakeService:
        self.setups.append(setup)
        return self

    def open(self) -> None:
        self.threads.add(threading.get_ident())
        self.opened += 1
        self._opening(self.opened)

    def write(self, record: ReportRecord) -> None:
        self.calls += 1
        self._before(self.calls)
        self.records.append(record)

    def close(self, end: End) -> None:
        self.ends.append(end)

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records]


def served(monkeypatch: pytest.MonkeyPatch, **fakes: Any) -> None:
    """Makes services of these names; the package of each is one that is there."""
    for name, fake in fakes.items():
        monkeypatch.setitem(services.SERVICES, name, ReportService("json", fake.writer))


def raises(error: BaseException) -> Callable[..., Any]:
    """A call that fails each time."""

    def call(*args: Any) -> None:
        raise error

    return call
