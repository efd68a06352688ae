"""`onward bench`: training steps of one model by several engines, each in a process of its own.
They take turns, on the same batches; times are medians, and losses are compared in the same run.
Times are seconds, sizes bytes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onward.environment import environment_variables
from onward.errors import OnwardError
from onward.recipes.bench_options import BENCH_ENGINES, BenchConfig, check_bench
from onward.recipes.own_program import own_command

WORKER = "--worker"
EXACT_STEPS = 3  # steps without dropout whose losses are compared
LIMITS = {"fp32": 1e-3, "bf16": 5e-2}  # relative difference of losses that is none yet
_PAUSE = 0.2  # seconds in which the threads of the engine before stop spinning


class EngineProcessError(Exception):
    """Raised for an engine that fails, or whose process ends; the message is its reason."""


class EngineProcess:
    """The parent's end of the pipe to an engine's process."""

    def __init__(self, name: str) -> None:
        engine = BENCH_ENGINES[name]
        self._process = subprocess.Popen(
            own_command("bench", WORKER),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment_variables(), **engine.env},
        )

    def ask(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Sends a message; returns its answer."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            print(json.dumps([name, arguments]), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = process.wait()
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise EngineProcessError(f"its process ended ({how})")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineProcessError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self._process.terminate()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def bench(target: str, config: BenchConfig) -> int:
    """Measures, prints a table and writes it where asked. Returns 1 where an engine has failed or
    its losses differ from the others'. Raises InputError for invalid input."""
    check_bench(target, config)
    cases = [measured(target, config, precision) for precision in config.precisions]
    found = _finite({"target": target, "machine": _machine(), "cases": cases})
    if config.output_dir is not None:
        _write(Path(config.output_dir), found)
    print(json.dumps(found, indent=1) if config.json else "\n\n".join(map(table, cases)))
    bad = any("error" in each or each.get("same") is False for c in cases for each in c["engines"])
    return int(bad)


def measured(target: str, config: BenchConfig, precision: str) -> dict[str, Any]:
    """The results of every engine in one precision."""
    processes: dict[str, EngineProcess] = {}
    results: dict[str, dict[str, Any]] = {}
    sizes = [config.batch_size, config.sequence_length]
    asked = (precision, target, sizes, config.batches, config.warmup)

    def ask(name: str, what: str, *arguments: Any) -> dict[str, Any]:
        """The answer of an engine; {} where it fails, which its result says."""
        try:
            return processes[name].ask(what, *arguments)
        except EngineProcessError as error:
            results[name]["error"] = str(error)
            return {}

    with contextlib.ExitStack() as stack:
        for name in config.engine_names:
            processes[name] = EngineProcess(name)
            stack.callback(processes[name].close)
            results[name] = {"engine": name, "about": BENCH_ENGINES[name].about, "rounds": []}
            _say(f"{precision}: {name}: first step")
            results[name] |= ask(name, "prepare", name, *asked)
        for number in range(config.rounds):
            running = [name for name, each in results.items() if "error" not in each]
            for name in running[:: -1 if number % 2 else 1]:
                time.sleep(_PAUSE)
                start = 1 + config.warmup + number * config.steps
                if answer := ask(name, "run", start, config.steps):
                    results[name]["rounds"].append(answer["seconds"])
                    results[name]["losses"] += answer["losses"]
                    results[name]["step_bytes"] = answer["step_bytes"]
            _say(f"{precision}: round {number + 1} of {config.rounds}")
        if any(each.get("random") for each in results.values()):
            for name, each in results.items():
                if "error" not in each:
                    _say(f"{precision}: {name}: losses without dropout")
                    each["exact_losses"] = ask(name, "exact", EXACT_STEPS).get("losses")
    for each in results.values():
        _summarise(each)
    _compare(list(results.values()), LIMITS[precision])
    return {"precision": precision, "engines": list(results.values())}


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def _summarise(result: dict[str, Any]) -> None:
    """Adds the median of all steps, and the least and largest median of a round."""
    if "error" in result or not result["rounds"]:
        return
    medians = [statistics.median(seconds) for seconds in result["rounds"]]
    result["step_s"] = statistics.median([s for seconds in result["rounds"] for s in seconds])
    result["round_s"] = [min(medians), max(medians)]


def _compare(results: Sequence[dict[str, Any]], limit: float) -> None:
    """Adds to each engine the largest relative difference of its losses from those of the first one
    that has any: step by step, without dropout where the model has some."""
    done = [each for each in results if "error" not in each]
    for each in done:
        losses, reference = (
            one["losses"] if one.get("exact_losses") is None else one["exact_losses"]
            for one in (each, done[0])
        )
        pairs = list(zip(losses, reference, strict=True))
        finite = all(math.isfinite(loss) for pair in pairs for loss in pair)
        differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
        each["loss_difference"] = max(differences) if finite else None
        each["compared_with"] = done[0]["engine"]
        each["same"] = finite and max(differences) <= limit


def table(case: Mapping[str, Any]) -> str:
    """The results of one precision as text: how fast beside the first engine that ran."""
    heads = ("ms/step", "round medians", "speed", "step MiB", "first s", "loss differs")
    widths = (9, 17, 8, 10, 9, 14)
    engines = case["engines"]
    name_width = max(len(each["engine"]) for each in engines) + 2
    lines = [
        f"{case['precision']:<{name_width}}"
        + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    ]
    first = next((each for each in engines if "step_s" in each), None)
    for each in engines:
        if "step_s" not in each or first is None:
            lines.append(f"{each['engine']:<{name_width}}  {each.get('error', 'nothing ran')}")
            continue
        low, high = (1e3 * s for s in each["round_s"])
        nbytes = each["step_bytes"]
        cells = (
            f"{1e3 * each['step_s']:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{first['step_s'] / each['step_s']:.2f}x",
            "-" if nbytes is None else f"{nbytes / 2**20:.0f}",
            f"{each['first_step_s']:.2f}",
            _difference(each),
        )
        lines.append(
            f"{each['engine']:<{name_width}}"
            + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        )
    return "\n".join(lines)


def _difference(result: Mapping[str, Any]) -> str:
    if result["engine"] == result["compared_with"]:
        return "-"
    shown = (
        "not finite" if result["loss_difference"] is None else f"{result['loss_difference']:.0e}"
    )
    return shown if result["same"] else f"{shown} TOO FAR"


def _finite(value: Any) -> Any:
    """The value with null for each number that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _machine() -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def _write(folder: Path, found: Mapping[str, Any]) -> None:
    """Writes bench.json and, where matplotlib is installed, bench.svg. Raises OnwardError where
    that is impossible."""
    from onward.checkpoint import StagedFiles
    from onward.recipes.run_folder import write_json

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with StagedFiles(folder) as staged:
            write_json(staged.path / "bench.json", found)
            _draw(staged.path / "bench.svg", found["cases"])
            staged.publish()
    except OSError as error:
        fix = "name another --output_dir"
        raise OnwardError(f"cannot write into {str(folder)!r} ({error}); fix: {fix}") from error


def _draw(path: Path, cases: Sequence[Mapping[str, Any]]) -> None:
    """Draws the time of a step of each engine as a bar, with the spread of its rounds."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    rows = [
        (f"{each['engine']}, {case['precision']}", each)
        for case in cases
        for each in case["engines"]
        if "step_s" in each
    ]
    figure = Figure(figsize=(7, 1 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for number, (_, each) in enumerate(rows):
        middle = 1e3 * each["step_s"]
        low, high = (1e3 * s for s in each["round_s"])
        spread = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        color = "#d55e00" if each["engine"] == "onward" else "#999999"
        axes.barh(number, middle, xerr=spread, color=color)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms a step (median; spread of the rounds)")
    figure.savefig(path, format="svg", metadata={"Date": None})


__all__ = ["EngineProcess", "EngineProcessError", "bench", "measured", "table"]
