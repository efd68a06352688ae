"""Processes that may be killed: forks of this one, which has imported everything, with an answer.

A fork spares each case the imports. The parent never runs a model, so that no thread is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# the system calls that change a disk
CALLS = ("openat", "write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate", "rename",
         "renameat", "renameat2", "mkdir", "mkdirat", "unlink", "unlinkat", "rmdir", "link",
         "linkat", "copy_file_range", "fallocate")  # fmt: skip


class Ended(NamedTuple):
    """How a process ended. status: its exit status, or minus the signal that killed it. answer:
    what its work returned; None where it did not. said: what it wrote to stdout and stderr."""

    status: int
    answer: Any
    said: str

    @property
    def last_line(self) -> str:
        """The last line that it said, without paths."""
        lines = self.said.strip().splitlines() or [""]
        return re.sub(r"/\S*/", "", lines[-1])[:200]


class Child:
    """A fork of this process that runs `work` and ends. prepare: runs first in it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `wait`
        self._answer, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._answer)
            self._run(work, writing)
        os.close(writing)

    def _run(self, work: Callable[[], Any], writing: int) -> None:
        status = 1
        try:
            for number in (1, 2):
                os.dup2(self._said.fileno(), number)
            self._before = sys.stdout, sys.stderr  # whose end might close what is opened now
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(writing, json.dumps(work()).encode())
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except KeyboardInterrupt:
            status = 128 + signal.SIGINT  # as a shell names the end of a Python program by it
            traceback.print_exc()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def stopped(self) -> bool:
        """Waits until the process stops itself, and returns true; false where it ends instead."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return True
        self._status = status
        return False

    def wait(self, timeout: float = 600.0) -> Ended:
        """Waits for the end; after `timeout` seconds the process is killed."""
        parts: list[bytes] = []
        end = time.monotonic() + timeout
        while True:
            if not select.select([self._answer], [], [], max(0.0, end - time.monotonic()))[0]:
                self.kill()
                end += 10.0
            part = os.read(self._answer, 1 << 16)
            if not part:
                break
            parts.append(part)
        os.close(self._answer)
        _, status = os.waitpid(self.pid, 0)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        self._said.close()
        answer = json.loads(b"".join(parts)) if parts else None
        return Ended(os.waitstatus_to_exitcode(status), answer, said)


def in_child(work: Callable[[], Any], timeout: float = 600.0) -> Ended:
    """Runs `work` in a fork of this process, to its end."""
    return Child(work).wait(timeout)


def answer_of(work: Callable[[], Any]) -> Any:
    """What `work` returns in a fork of this process, of which nothing is to be killed. Raises
    RuntimeError where it fails or takes more than ten minutes."""
    ended = in_child(work)
    if ended.status:
        raise RuntimeError(f"a process ended with status {ended.status}: {ended.said[-500:]}")
    return ended.answer


def stop_here(number: int = 0) -> None:
    """Stops this process until it is let go on: a hook for `traced`."""
    os.kill(os.getpid(), signal.SIGSTOP)


def calls_in(child: Child, folder: Path) -> list[tuple[str, int]]:
    """Lets a child that has stopped itself go on, and returns the calls by which it changes the
    disk under `folder`: names, each with which call of its name it is, from 1."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        tracer = _attached(child, ["-y", "-s", "0", "-o", str(log)])
        child.wait()
        tracer.wait(60)
        found: list[tuple[str, int]] = []
        count: dict[tuple[str, str], int] = {}
        for line in log.read_text(errors="replace").splitlines():
            match = re.match(r"(\d+) +(\w+)\(", line)
            if match is None:
                continue
            thread, name = match.groups()
            count[thread, name] = count.get((thread, name), 0) + 1
            reading = name == "openat" and not re.search("O_(WRONLY|RDWR|CREAT)", line)
            if str(folder) in line and not reading:
                found.append((name, count[thread, name]))
    return found


def killed_at(child: Child, call: str, number: int) -> Ended:
    """Lets a child that has stopped itself go on until it is about to make a call for the
    `number`th time, and kills it there."""
    tracer = _attached(child, ["-o", "/dev/null", "-e", f"inject={call}:signal=KILL:when={number}"])
    ended = child.wait()
    tracer.wait(60)
    return ended


def _attached(child: Child, arguments: list[str]) -> subprocess.Popen[bytes]:
    """strace on a child that has stopped itself; then the child goes on."""
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-e", f"trace={','.join(CALLS)}", *arguments, "-p", str(child.pid)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    status = Path(f"/proc/{child.pid}/status")
    end = time.monotonic() + 30.0
    while "TracerPid:\t0\n" in status.read_text():
        if time.monotonic() > end or tracer.poll() is not None:
            child.kill()
            raise RuntimeError("strace cannot look at a process here")
        time.sleep(0.005)
    time.sleep(0.02)  # its threads too
    os.kill(child.pid, signal.SIGCONT)
    return tracer
