"""A signal within an import ends the process; elsewhere it is handled as ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onward.import_signals import importing

# a module that takes two seconds in small steps, as an import of many files does; it sends its
# process a signal after 0.2 of them, and says what it has met
SLOW = """
import os, sys, time
try:
    began, sent = time.monotonic(), False
    while time.monotonic() - began < 2.0:
        if not sent and time.monotonic() - began > 0.2:
            sent = True
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


def ended(program: str, folder: Path, number: int) -> tuple[int, str, str]:
    """The status, the output and the errors of a program whose import gets a signal."""
    text = SLOW.replace("NUMBER", str(int(number)))
    (folder / "slow_module.py").write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("program", "number", "line"),
    [
        (BY_COMMAND_LINE, signal.SIGINT, "onward slow: interrupted\n"),
        (BY_RUN, signal.SIGINT, "onward finetune: stopped by SIGINT\n"),
        (BY_RUN, signal.SIGTERM, "onward finetune: stopped by SIGTERM\n"),
    ],
)
def test_the_process_ends_within_an_import(
    program: str, number: int, line: str, tmp_path: Path
) -> None:
    # neither does the module see an exception, nor does its import go on
    assert ended(program, tmp_path, number) == (128 + number, "", line)


def test_a_run_that_is_asked_to_end_behind_its_step_imports_on(tmp_path: Path) -> None:
    program = BY_RUN.replace(
        "    with StopSignals():", "    with StopSignals(False) as signals, signals.deferred():"
    )
    status, said, errors = ended(program, tmp_path, signal.SIGTERM)
    assert (status, said, errors) == (143, "whole\n", "stopped by SIGTERM\n")


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
