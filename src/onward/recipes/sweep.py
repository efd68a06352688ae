"""`onward sweep`: the runs of a file, one after another, each a process and a folder of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from onward.errors import OnwardError
from onward.recipes.options import InputError
from onward.recipes.own_program import own_command
from onward.recipes.sweep_file import Check, SweepConfig, SweepRun, check_runs, runs_of

RECORD, RESULTS = "sweep.json", "eval_results.json"
_STOPPED = (130, 143)  # exit statuses after Ctrl-C and SIGTERM
_COLUMNS = ("eval_loss", "perplexity", "train_loss", "train_runtime")
_KEPT = 4096  # bytes of what a process says at its end


def sweep(path: str, config: SweepConfig, check: Check) -> int:
    """Starts what is left of a sweep's runs. Returns 1 where one has failed, and the status of a
    run that a signal has stopped. check: parses and checks a run's options.

    Raises InputError before the first run starts, if the options of any are invalid.
    """
    runs = runs_of(path)
    check_runs(runs, check)
    folder = Path(config.output_dir or f"runs/{Path(path).stem}")
    if config.dry_run:
        for run in runs:
            print(shlex.join(["onward", *_words(run, folder)]))
        return 0
    states = _states(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "name another --output_dir"
        raise OnwardError(f"cannot make {str(folder)!r} ({error}); fix: {fix}") from error
    stopped = 0
    for number, run in enumerate(runs, 1):
        name, words = run.name, _words(run, folder)
        if _is_complete(folder / name, states.get(name), words):
            print(f"sweep: run {number} of {len(runs)}, {name}: complete", file=sys.stderr)
            continue
        print(f"sweep: run {number} of {len(runs)}, {name}", file=sys.stderr, flush=True)
        status, reason = _ran(own_command(*words))
        stopped = abs(status) + 128 if -status in (2, 15) else status if status in _STOPPED else 0
        state = "complete" if not status else "stopped" if stopped else "failed"
        states[name] = {"command": words, "state": state, "status": status}
        if state == "failed":
            states[name]["reason"] = reason
        _publish(folder, states)
        if stopped:
            print(f"sweep: stopped; the same command goes on in {folder}", file=sys.stderr)
            break
    rows = [_row(run, folder, states.get(run.name)) for run in runs]
    rows.sort(key=lambda row: (row["eval_loss"] is None, row["eval_loss"] or 0.0))
    print(json.dumps(rows, indent=1) if config.json else table(rows))
    return stopped or int(any(row["state"] == "failed" for row in rows))


def _words(run: SweepRun, folder: Path) -> list[str]:
    return ["finetune", *run.words, f"--output_dir={folder / run.name}"]


def _is_complete(folder: Path, state: Mapping[str, Any] | None, words: Sequence[str]) -> bool:
    """Tells whether this very command has ended well there. What is left of any other, `onward
    finetune` itself knows."""
    if state is None or state.get("command") != list(words) or state.get("state") != "complete":
        return False
    return (folder / RESULTS).is_file() or (folder / "compare.json").is_file()


def _states(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of runs by name, from earlier calls. Raises InputError for a damaged file."""
    path = folder / RECORD
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or not all(isinstance(v, dict) for v in found.values()):
            raise ValueError("it is no record of a sweep")
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {str(path)!r} ({error})", "in --output_dir", "name another folder"
        ) from error
    return found


def _publish(folder: Path, states: Mapping[str, Any]) -> None:
    """Writes the record of the sweep, whole or not at all."""
    partial = folder / f".{RECORD}.{os.getpid()}"
    partial.write_text(json.dumps(states, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / RECORD)


def _ran(command: Sequence[str]) -> tuple[int, str]:
    """Runs a process, whose output goes to stderr; returns its status and the last line that it
    says there. A signal for this process stops that one, which saves what it has."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        last = b""
        with _passing_on(process):
            while chunk := process.stdout.read1(_KEPT):  # type: ignore[attr-defined]
                sys.stderr.write(chunk.decode("utf-8", "replace"))
                sys.stderr.flush()
                last = (last + chunk)[-_KEPT:]
            status = process.wait()
    lines = [line for line in last.decode("utf-8", "replace").splitlines() if line.strip()]
    return status, lines[-1] if lines else ""


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A context in which SIGTERM goes to the process, and Ctrl-C, which the terminal sends to both,
    waits for its end. Signals are left alone outside of the main thread."""

    def terminate(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Does nothing: the process has heard it too."""

    before: dict[int, Any] = {}
    with suppress(ValueError):
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, terminate)
        before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _row(run: SweepRun, folder: Path, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """A run's line of the table: its own options, its results, its state."""
    try:
        results = json.loads((folder / run.name / RESULTS).read_bytes())
    except (OSError, ValueError):
        results = {}
    said = dict(state or {"state": "not started"})
    done = said["state"] == "complete"
    row: dict[str, Any] = {"run": run.name, "state": said["state"], "options": run.varied}
    row |= {name: results.get(name) if done else None for name in _COLUMNS}
    return row | ({"reason": said["reason"]} if "reason" in said else {})


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The results as text, the smallest evaluation loss first."""
    width = max(3, *(len(row["run"]) for row in rows))
    lines = [f"{'run':<{width}}" + "".join(f"{name:>15}" for name in _COLUMNS)]
    for row in rows:
        if row["state"] == "complete" and row["eval_loss"] is not None:
            cells = "".join(f"{row[name]:>15.4f}" for name in _COLUMNS)
            lines.append(f"{row['run']:<{width}}{cells}")
        else:
            reason = f": {row['reason']}" if row.get("reason") else ""
            lines.append(f"{row['run']:<{width}}  {row['state']}{reason}")
    return "\n".join(lines)


__all__ = ["sweep", "table"]
