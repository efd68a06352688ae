"""Processes that judge seeds: each worker is one of its own, so that what kills it is a finding."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Verdict = dict[str, Any]
PATIENCE = 180.0  # seconds for one program


def serve(verdict_of: Callable[[int], Verdict]) -> None:
    """A worker: seeds on stdin, a verdict a line on stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no verdict
    for line in sys.stdin:
        out.write(json.dumps(verdict_of(int(line))) + "\n")
        out.flush()


class Process:
    """A process that answers lines by lines, started again where one of them ends it."""

    def __init__(self, command: Sequence[str], errors: Path = Path(os.devnull)) -> None:
        """errors: the file for what it says besides."""
        self.command, self._errors = command, errors
        self.process: subprocess.Popen[str] | None = None

    def _start(self) -> subprocess.Popen[str]:
        with self._errors.open("w", encoding="utf-8") as errors:
            return subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, start_new_session=True,  # Ctrl-C is for the one who writes the report
            )  # fmt: skip

    def ask(self, line: str, patience: float) -> dict[str, Any] | int:
        """What the process answers, or the code with which it has ended, by itself or since the
        seconds of patience were over."""
        process = self.process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(patience, process.kill)
        timer.start()
        try:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return json.loads(answer)
        code = process.wait()
        self.close()
        return code

    def close(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None and self.process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # what a dead process was not told
                self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()
            self.process = None


class Worker(Process):
    """A process that judges seeds."""

    def judge(self, seed: int) -> Verdict:
        found = self.ask(str(seed), PATIENCE)
        if not isinstance(found, int):
            return found
        return {
            "seed": seed, "kind": "crash", "finding": True, "signature": f"crash: exit {found}",
            "detail": f"the process ended with {found}", "variant": {}, "at": 0, "seconds": 0.0,
        }  # fmt: skip


def by_workers(
    seeds: Iterable[int],
    command: Sequence[str],
    number: int,
    seconds: float = 0.0,
    wanted: Callable[[int], bool] = lambda seed: True,
) -> list[Verdict]:
    """The verdicts of several workers, who are started by `command`, on seeds that are wanted.
    seconds: after which none begins another; 0: all are judged."""
    waiting: queue.Queue[int] = queue.Queue()
    for seed in seeds:
        waiting.put(seed)
    end = time.monotonic() + (seconds or 1e9)
    found: list[Verdict] = []

    def work() -> None:
        worker = Worker(command)
        while time.monotonic() < end:
            try:
                seed = waiting.get_nowait()
            except queue.Empty:
                break
            if not wanted(seed):
                continue
            verdict = worker.judge(seed)
            found.append(verdict)
            if verdict["finding"]:
                print(f"seed {seed}: {verdict['signature']}", flush=True)
        worker.close()

    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # what was found so far is worth a report
        print("stopped: each worker ends its program", flush=True)
        end = 0.0
        for thread in threads:
            thread.join()
    return found


def report(found: Sequence[Verdict], what: str) -> None:
    """Prints what was judged, why it was not, and the causes of findings. what: was judged."""
    kinds = Counter(v["kind"] for v in found)
    total = len(found) or 1
    print(f"{len(found)} {what}s: " + ", ".join(f"{n} {k}" for k, n in kinds.most_common()))
    print(f"{sum(v['seconds'] for v in found) / total:.2f} s of processor time a {what}")
    for kind in ("refused", "invalid"):
        reasons = Counter(v["signature"] for v in found if v["kind"] == kind)
        print(f"{kind} ({100 * kinds[kind] / total:.0f} %):")
        for reason, n in reasons.most_common(15):
            example = next(v["seed"] for v in found if v["signature"] == reason)
            print(f"  {n:4} {reason} (seed {example})")
    causes = Counter(v["signature"] for v in found if v["finding"])
    if causes:
        print("findings:")
    for cause, n in causes.most_common():
        examples = [v["seed"] for v in found if v["signature"] == cause]
        print(f"  {n:4} {cause} (seeds {', '.join(map(str, sorted(examples)[:6]))})")
