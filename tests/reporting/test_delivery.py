"""A service that is down, slow, full or broken costs reports and nothing else: `log` waits for
none, what is lost is counted and told, and what is sent is in order."""

from __future__ import annotations

import errno
import math
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_services import LONG, FakeService, raises, served
from torch import nn

import onward
from onward.reporting import delivery as module
from onward.reporting import reporter as reporters
from onward.reporting import services
from onward.reporting.delivery import ReportDelivery
from onward.reporting.record import ReportRecord
from onward.reporting.services import ReportService

FULL = OSError(errno.ENOSPC, "No space left on device")
NO_PAUSE = (0.0,)


def record(step: int) -> ReportRecord:
    return ReportRecord(step, {"loss": float(step)}, 1.7e9)


class Held:
    """A gate in a service: calls wait in it until it is let go."""

    def __init__(self) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()

    def __call__(self, call: int) -> None:
        self.reached.set()
        self.gate.wait(LONG)


@pytest.fixture
def told() -> list[str]:
    return []


def sent(
    fake: FakeService, told: list[str], steps: range, *, capacity: int = 10_000
) -> ReportDelivery:
    """A delivery to which all steps were put, and which has ended in good order."""
    found = ReportDelivery("fake", fake, told.append, capacity=capacity, pauses=NO_PAUSE)
    for step in steps:
        found.put(record(step))
    found.finish("finished")
    found.join(LONG)
    return found


def test_everything_is_sent_in_order_by_one_other_thread(told: list[str]) -> None:
    fake = FakeService()
    found = sent(fake, told, range(500))
    assert fake.steps == list(range(500)) and fake.ends == ["finished"]
    assert (found.delivered, found.lost, found.waiting, told) == (500, 0, 0, [])
    assert fake.opened == 1 and threading.get_ident() not in fake.threads
    assert found.status() == ""


def test_a_service_that_hangs_stops_nobody_and_what_is_lost_is_told(told: list[str]) -> None:
    held = Held()
    fake = FakeService(before=held)
    found = ReportDelivery("fake", fake, told.append, capacity=50)
    found.put(record(0))
    assert held.reached.wait(LONG)
    for step in range(1, 1000):  # the writer stands still in the first one all the time
        found.put(record(step))
        assert found.waiting <= 51  # bounded, with the one that is being written
    assert found.lost == 1000 - 51 and fake.records == []
    assert found.status() == "fake 949 records lost, 51 waiting"
    found.finish("finished")
    found.join(0.01)
    [line] = told
    assert line.startswith("1000 of 1000 records were not delivered to fake (")
    held.gate.set()  # a service that comes back too late gets no more
    found._thread.join(LONG)
    assert fake.steps == [0] and fake.ends == [] and not found._thread.is_alive()


def test_the_oldest_are_dropped_so_that_the_results_arrive(told: list[str]) -> None:
    held = Held()
    fake = FakeService(before=held)
    found = ReportDelivery("fake", fake, told.append, capacity=10)
    found.put(record(0))
    assert held.reached.wait(LONG)
    for step in range(1, 101):
        found.put(record(step))
    held.gate.set()
    found.finish("finished")
    found.join(LONG)
    assert fake.steps == [0, *range(91, 101)]
    assert told == ["90 of 101 records were not delivered to fake"]


@pytest.mark.parametrize(
    "error", [ConnectionError("refused"), FULL, MemoryError(), SystemExit(3), KeyboardInterrupt()]
)
@pytest.mark.parametrize("where", ["open", "write"])
def test_what_always_fails_is_told_once_and_counted(
    error: BaseException, where: str, told: list[str]
) -> None:
    failing = raises(error)
    fake = FakeService(opening=failing) if where == "open" else FakeService(before=failing)
    found = sent(fake, told, range(20))
    assert (found.delivered, found.lost, fake.records) == (0, 20, [])
    assert len(told) == 2 and type(error).__name__ in told[0] and told[0].startswith("reports to")
    assert told[1].startswith("20 of 20 records were not delivered to fake (")


def test_what_fails_now_and_then_arrives_all_the_same_once_and_in_order(told: list[str]) -> None:
    draw = random.Random(0)

    def sometimes(call: int) -> None:
        if draw.random() < 0.4:
            raise ConnectionError("reset")

    fake = FakeService(before=sometimes, opening=sometimes)
    found = ReportDelivery("fake", fake, told.append, pauses=NO_PAUSE)
    for step in range(300):
        found.put(record(step))
    while found.waiting > 20:  # those that fail thrice in a row are given up: few
        threading.Event().wait(0.005)
    found.finish("finished")
    found.join(LONG)
    assert fake.steps == sorted(set(fake.steps))
    assert found.delivered == len(fake.steps) and found.delivered + found.lost == 300
    assert found.delivered > 200 and len([t for t in told if "fail" in t]) == 1


def test_a_record_that_is_always_refused_does_not_block_those_after_it(told: list[str]) -> None:
    fake = FakeService()

    def refuse(call: int) -> None:
        if len(fake.records) == 3 and 4 <= call <= 6:
            raise ValueError("no such name")

    fake._before = refuse
    found = sent(fake, told, range(8))
    assert fake.steps == [0, 1, 2, 4, 5, 6, 7] and (found.delivered, found.lost) == (7, 1)
    assert fake.opened == 4  # it begins anew after each failure


def test_pauses_grow_and_an_outage_loses_nothing(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    came_back = 9

    def down(call: int) -> None:  # from the third record on, it does not open again
        if 2 <= call < came_back:
            raise ConnectionError("down")

    def goes_down(call: int) -> None:
        if call == 3:
            raise ConnectionError("reset")

    fake = FakeService(before=goes_down, opening=down)
    wait_for = threading.Condition.wait_for

    def at_once(self: threading.Condition, predicate: Callable[[], bool], pause: float) -> bool:
        waited.append(pause)
        return wait_for(self, predicate, 0)

    monkeypatch.setattr(threading.Condition, "wait_for", at_once)
    found = ReportDelivery("fake", fake, told.append)
    for step in range(50):
        found.put(record(step))
    while found.waiting:
        threading.Event().wait(0.005)
    found.finish("finished")
    found.join(LONG)
    assert fake.steps == list(range(50)) and found.lost == 0
    assert waited == [*module.PAUSES, module.PAUSES[-1]] and sorted(waited) == waited
    assert len(told) == 1  # that it failed; nothing was lost


def test_the_end_does_not_wait_out_a_pause(told: list[str]) -> None:
    failed = threading.Event()

    def once(call: int) -> None:
        if call == 1:
            failed.set()
            raise ConnectionError("down")

    fake = FakeService(before=once)
    found = ReportDelivery("fake", fake, told.append, pauses=(3600.0,))
    found.put(record(1))
    assert failed.wait(LONG)
    while not found.error:
        time.sleep(0.001)
    assert found.status() == "fake fails (ConnectionError), 1 waiting"
    found.finish("stopped")
    found.join(LONG)
    assert fake.steps == [1] and fake.ends == ["stopped"] and found.lost == 0


def test_a_service_that_fails_or_hangs_at_its_end_is_told(told: list[str]) -> None:
    fake = FakeService()
    fake.close = raises(FULL)
    sent(fake, told, range(3))
    assert told == [f"the run at fake was not ended: OSError: {FULL}"]
    told.clear()
    fake, held = FakeService(), Held()
    fake.close = held  # type: ignore[method-assign, assignment]
    found = ReportDelivery("fake", fake, told.append)
    found.put(record(1))
    found.finish("finished")
    assert held.reached.wait(LONG)
    found.join(0.01)
    [line] = told
    assert line.startswith("the run at fake was not ended: ") and found.delivered == 1
    held.gate.set()


def test_no_more_threads_and_a_stderr_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        found = ReportDelivery("fake", FakeService(), raises(BrokenPipeError()))
    found.put(record(1))
    found.finish("finished")
    found.join(LONG)
    assert found.lost == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # threads; newer Pythons warn
def test_a_forked_process_reports_nothing_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    held = Held()
    fake = FakeService(before=held)
    served(monkeypatch, fake=fake)
    with onward.Reporter("fake", tell=told.append) as reporter:
        reporter.log(1, {"loss": 1.0})
        assert held.reached.wait(LONG)
        with reporter._deliveries[0]._changed:  # as if the fork came while the thread had the lock
            child = os.fork()
            if not child:
                told.clear()
                reporter.log(2, {"loss": 2.0})
                reporter.close()
                os._exit(0 if told == ["a forked process reports nothing to fake"] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held.gate.set()
    assert fake.steps == [1] and told == []


def test_values_are_numbers_of_any_kind_and_the_rest_is_told_once(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    fake = FakeService()
    served(monkeypatch, fake=fake)
    with onward.Reporter(["fake"], tell=told.append) as reporter:
        metrics = {
            "float": 0.5, "int": 3, "bool": True, "numpy": np.float32(0.25), "array": np.ones(1),
            "tensor": torch.tensor(2.0, requires_grad=True), "bf16": torch.ones(()).bfloat16(),
            "nan": math.nan, "inf": -math.inf, "none": None,
            "text": "3", "two": torch.ones(2), "complex": 1j, "huge": 10**400, "object": object(),
        }  # fmt: skip
        reporter.log(np.int64(7), metrics)
        metrics["float"] = 9.0
        reporter.log(8, {"text": "x", "none": None})  # nothing is left of it
        with pytest.raises(TypeError):
            reporter.log(1.5, {})  # type: ignore[arg-type]
    [only] = fake.records
    assert only.step == 7 and type(only.step) is int
    expected = {"float": 0.5, "int": 3.0, "bool": 1.0, "numpy": 0.25, "array": 1.0, "tensor": 2.0}
    expected |= {"bf16": 1.0, "nan": math.nan, "inf": -math.inf}
    assert list(only.metrics) == list(expected)
    assert all(type(value) is float for value in only.metrics.values())
    np.testing.assert_equal(dict(only.metrics), expected)
    assert [line.split("'")[1] for line in told] == ["text", "two", "complex", "huge", "object"]
    assert all(line.endswith(" is not a number") for line in told)


@pytest.mark.parametrize(
    ("error", "end"),
    [(None, "finished"), (ValueError(), "failed"), (KeyboardInterrupt(), "stopped")],
)
def test_services_learn_how_a_run_ended(
    error: BaseException | None, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, other = FakeService(), FakeService()
    served(monkeypatch, fake=fake, other=other)
    try:
        with onward.Reporter("fake, other") as reporter:
            reporter.log(1, {"loss": 1.0})
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert fake.ends == other.ends == [end] and fake.steps == other.steps == [1]


def test_one_limit_holds_for_all_services_together(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    held, good = Held(), FakeService()
    served(monkeypatch, bad=FakeService(before=held), worse=FakeService(opening=held), good=good)
    reporter = onward.Reporter(["bad", "worse", "good"], tell=told.append)
    reporter.log(1, {"loss": 1.0})
    limits: list[float] = []
    join = ReportDelivery.join
    monkeypatch.setattr(
        ReportDelivery,
        "join",
        lambda self, seconds: (limits.append(seconds), join(self, seconds))[1],
    )
    reporter.close(0.2)
    assert limits[0] <= 0.2 and limits[1] <= limits[0] and limits[2] <= 0.01
    lost = [line.partition(" (")[0] for line in told]
    for name in ("bad", "worse"):
        assert f"1 of 1 records were not delivered to {name}" in lost
    reporter.close()  # nothing to do any more
    told.clear()
    reporter.log(2, {"loss": 1.0})
    reporter.log(3, {"loss": 1.0})
    assert told == ["the Reporter is closed: step 2 and later ones are not reported"]
    held.gate.set()


def test_a_reporter_that_nobody_closes_is_closed_when_python_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(reporters.atexit, "register", registered.append)
    fake = FakeService()
    served(monkeypatch, fake=fake)
    onward.Reporter("fake").log(1, {"loss": 1.0})
    [at_exit] = registered
    at_exit()
    assert fake.steps == [1] and fake.ends == ["finished"]


def test_a_service_that_cannot_be_set_up_is_refused_before_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken, good = FakeService(), FakeService()
    monkeypatch.setattr(broken, "writer", raises(ImportError("libx.so\nis missing")))
    served(monkeypatch, good=good, broken=broken)
    with pytest.raises(onward.OnwardError) as caught:
        onward.Reporter(["good", "broken"])
    assert str(caught.value).startswith(
        "reports to broken cannot be set up (ImportError: libx.so is missing); fix: "
    )
    assert good.opened == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ()), ("none", ()), ([], ()), (["none"], ()), ("", ()), ("a,b", ("a", "b")),
     (["b", "a"], ("b", "a")), ("a, a", ("a",)), ("all", ("a", "b")), (["all"], ("a", "b"))],
)  # fmt: skip
def test_what_is_reported_to(
    given: str | list[str] | None, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "SERVICES", {})
    served(monkeypatch, a=FakeService(), b=FakeService())
    services.SERVICES["gone"] = ReportService("no_such_package", FakeService().writer)
    assert services.reported_to(given) == expected
    with pytest.raises(onward.OnwardError, match="pip install 'onward\\[report\\]'"):
        services.reported_to("a,gone")
    with pytest.raises(onward.OnwardError, match="unknown service in report_to: 'wandbb'"):
        services.reported_to("wandbb")
    with pytest.raises(onward.OnwardError, match="stand alone"):
        services.reported_to(["a", "none"])
    del services.SERVICES["a"], services.SERVICES["b"]
    told: list[str] = []
    onward.Reporter("all", tell=told.append).log(1, {"loss": 1.0})
    assert told == ["nothing is reported: no service's package is installed"]


def test_a_folder_without_code_is_no_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "left_by_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not ReportService("left_by_runs", FakeService().writer).is_installed


def test_names_at_services_outlive_a_process_and_a_disk_that_is_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: list[str]
) -> None:
    fake, folder = FakeService(), tmp_path / "run-a"
    served(monkeypatch, fake=fake)
    config = {"a": {"b": 1}, "c": None, "d": torch.float16, "e": [1]}
    for number in range(3):
        with onward.Reporter("fake", folder=folder, config=config):
            fake.setups[-1].keep(f"id-{number}")
    assert [setup.kept for setup in fake.setups] == [None, "id-0", "id-1"]
    assert {setup.name for setup in fake.setups} == {"run-a"}
    assert dict(fake.setups[0].config) == {"a.b": 1, "c": None, "d": "torch.float16", "e": "[1]"}
    assert {path.name for path in folder.iterdir()} == {"reports.json"}
    (folder / "reports.json").write_text('{"fake": "id', encoding="utf-8")  # damaged
    with onward.Reporter("fake", folder=folder, tell=told.append):
        monkeypatch.setattr(Path, "replace", raises(FULL))
        fake.setups[-1].keep("id-9")
    assert fake.setups[-1].kept is None
    assert len(told) == 1 and told[0].startswith("reports.json is not written (")


@pytest.mark.parametrize("service", ["none", "stuck", "broken", "slow"])
def test_a_loop_of_ones_own_trains_the_same_weights(
    service: str, monkeypatch: pytest.MonkeyPatch, told: list[str], plain_weights: list[bytes]
) -> None:
    held = Held()
    fakes = {
        "stuck": FakeService(before=held),
        "broken": FakeService(opening=raises(ConnectionError("refused"))),
        "slow": FakeService(before=lambda call: time.sleep(0.2)),
    }
    served(monkeypatch, **fakes)
    reporter = onward.Reporter(service, tell=told.append)
    assert trained(reporter) == plain_weights
    reporter.close(0.01)
    assert bool(told) == (service != "none")
    held.gate.set()


@pytest.fixture(scope="module")
def plain_weights() -> list[bytes]:
    """What the loop trains without a Reporter."""
    return trained(None)


def trained(reporter: onward.Reporter | None) -> list[bytes]:
    """The bytes of the weights after some steps with dropout."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    trainer = onward.Trainer(net, optimizer, nn.functional.cross_entropy)
    x, y = torch.randn(6, 8), torch.arange(6) % 5
    for step in range(1, 9):
        result = trainer.train_step(x, y)
        if reporter is not None:
            reporter.log(step, {"loss": result.loss, "grad_norm": result.grad_norm})
    return [p.detach().numpy().tobytes() for p in net.parameters()]
