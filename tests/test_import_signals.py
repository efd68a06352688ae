"""A signal that comes within an import is handled behind it, a second one at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onward.import_signals import importing

# a module that takes a second in small steps, as an import of many files does, and says what it has
# met; it sends its process a signal at 0.2 s and, for two, at 0.4 s
SLOW = """
import os, sys, time
try:
    began, sent = time.monotonic(), 0
    while time.monotonic() - began < 1.0:
        if sent < TIMES and time.monotonic() - began > 0.2 * (sent + 1):
            sent += 1
            os.kill(os.getpid(), NUMBER)
        time.sleep(0.01)
except BaseException as error:
    print("within the import", flush=True)
    raise
print("whole", flush=True)
"""
BY_COMMAND_LINE = """
import sys
from onward import cli
def slow(rest):
    import slow_module
    import time
    time.sleep(5)
cli.VERBS["slow"] = ("", slow)
sys.exit(cli.main(["slow"]))
"""
BY_RUN = """
import sys
from onward.recipes.stop_signals import Stopped, StopSignals
try:
    with StopSignals():
        import slow_module
        import time
        time.sleep(5)
except Stopped as stopped:
    print(stopped, file=sys.stderr)
    sys.exit(stopped.status)
"""


def ended(program: str, folder: Path, number: int, times: int) -> tuple[int, str, str]:
    """The status, the output and the errors of a program whose import gets signals."""
    text = SLOW.replace("NUMBER", str(int(number))).replace("TIMES", str(times))
    (folder / "slow_module.py").write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("program", "number"),
    [(BY_COMMAND_LINE, signal.SIGINT), (BY_RUN, signal.SIGINT), (BY_RUN, signal.SIGTERM)],
)
def test_the_import_ends_first(program: str, number: int, tmp_path: Path) -> None:
    status, said, errors = ended(program, tmp_path, number, 1)
    assert (status, said) == (128 + number, "whole\n"), errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("program", [BY_COMMAND_LINE, BY_RUN])
def test_a_second_one_is_handled_at_once(program: str, tmp_path: Path) -> None:
    status, said, errors = ended(program, tmp_path, signal.SIGINT, 2)
    assert (status, said) == (130, "within the import\n"), errors


def test_a_signal_outside_of_an_import_is_handled_at_once() -> None:
    program = BY_COMMAND_LINE.replace("    import slow_module\n", "").replace("5", "60")
    process = subprocess.Popen(
        [sys.executable, "-c", "print('begun', flush=True)\n" + program], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "onward slow: interrupted\n")


def test_no_import_leads_here() -> None:
    assert not importing(sys._getframe())
