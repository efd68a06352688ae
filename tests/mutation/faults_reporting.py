"""Faults of reports to services: what is lost, what is sent twice, and what waits."""

from __future__ import annotations

from fault import Fault

DELIVERY = ("reporting/test_delivery.py",)
SERVICES = ("reporting/test_services.py",)
RUNS = ("recipes/test_reports.py",)
_FILE = "reporting/delivery.py"

REPORTING_FAULTS: tuple[Fault, ...] = (
    Fault(
        "reports: the queue has no limit", _FILE,
        "if len(self._waiting) >= self._capacity:", "if False:", DELIVERY,
    ),
    Fault(
        "reports: the newest is dropped", _FILE,
        "                self._waiting.popleft()\n                self.lost += 1\n",
        "                self._waiting.pop()\n                self.lost += 1\n", DELIVERY,
    ),
    Fault(
        "reports: what is dropped is not counted", _FILE,
        "                self._waiting.popleft()\n                self.lost += 1\n",
        "                self._waiting.popleft()\n", DELIVERY,
    ),
    Fault(
        "reports: what fails is not tried again", _FILE,
        "TRIES = 3  #", "TRIES = 1  #", DELIVERY,
    ),
    Fault(
        "reports: a record is tried for ever", _FILE,
        "if self._tries >= TRIES and", "if False and", DELIVERY,
    ),
    Fault(
        "reports: an outage costs the first record", _FILE,
        "            if record is not None:\n                self._tries += 1\n",
        "            if self._held is not None:\n                self._tries += 1\n", DELIVERY,
    ),
    Fault(
        "reports: a service is not opened again after a failure", _FILE,
        "                is_open = False\n                if not",
        "                if not", DELIVERY,
    ),
    Fault(
        "reports: the end waits out a pause", _FILE,
        "lambda: self._end is not None or self._abandoned, pause)",
        "lambda: False, pause)", DELIVERY,
    ),
    Fault(
        "reports: pauses do not grow", _FILE,
        "self._pauses[min(self._failures, len(self._pauses)) - 1]", "self._pauses[-1]", DELIVERY,
    ),
    Fault(
        "reports: only errors of Exception are caught", _FILE,
        "            except BaseException as error:\n                is_open",
        "            except Exception as error:\n                is_open", DELIVERY,
    ),
    Fault(
        "reports: a failure is told each time", _FILE,
        "            self._told.add(what)\n", "", DELIVERY,
    ),
    Fault(
        "reports: a fork takes the lock", _FILE,
        "        if os.getpid() != self._pid:  # a fork", "        if False:  # a fork", DELIVERY,
    ),
    Fault(
        "reports: log waits for the service", "reporting/reporter.py",
        "                delivery.put(record)\n",
        "                delivery.put(record)\n                delivery.join(60.0)\n", DELIVERY,
    ),
    Fault(
        "reports: the mapping that was given is sent", "reporting/reporter.py",
        "found = dict(self._numbers(metrics))", "found = metrics", DELIVERY,
    ),
    Fault(
        "reports: nobody closes at Python's end", "reporting/reporter.py",
        "        atexit.register(self.close)\n", "", DELIVERY,
    ),
    Fault(
        "reports: a service is told that every run has finished", "reporting/reporter.py",
        'end = "failed" if', 'end = "finished" if', DELIVERY,
    ),
    Fault(
        "reports: TensorBoard shows updates twice", "reporting/to_tensorboard.py",
        "record.step if begun else None", "None", SERVICES,
    ),
    Fault(
        "reports: results have the names of metrics lines", "recipes/loop.py",
        "named.get(name, name): value", "name: value", RUNS,
    ),
    Fault(
        "reports: a new run has the old one's name", "recipes/run_folder.py",
        "(KEPT, f\"{EVENTS}/events.out.tfevents.*\")", "()", RUNS,
    ),
)  # fmt: skip
