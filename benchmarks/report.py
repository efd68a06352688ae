"""What a benchmark writes: the machine, the table, the JSON beside it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from limit import limit_line

MIB = 1 << 20
PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxruntime", "numpy", "triton", "onward")


def machine(device: str, threads: int = 0) -> dict[str, Any]:
    """What the numbers were measured on; `threads` where they are not torch's default."""
    import psutil
    import torch

    model = platform.processor()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpu = {}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        gpu = {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": psutil.getloadavg()[0],
        **gpu,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


def _commit() -> str:
    """The commit measured, marked when the tree held changes; empty outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return ""
    return done.stdout.strip()


def command() -> str:
    """The command line, with files by their names: this machine's folders say nothing elsewhere."""
    words = [
        flag + equals + Path(value).name
        for flag, equals, value in (word.rpartition("=") for word in sys.argv[1:])
    ]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def heading(report: Mapping[str, Any]) -> list[str]:
    """Title, machine, versions and command, as lines of Markdown."""
    host = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    where = host.get("gpu") or f"{host['cpu']}, {host['threads']} threads, {host['capability']}"
    return [
        f"# {report['title']}",
        "",
        f"{host['date']}, {where}, {host['memory_bytes'] / 2**30:.0f} GiB memory, "
        f"Python {host['python']}.",
        f"{versions}. Commit {host['commit'] or 'unknown'}, load before {host['load_before']:.1f}.",
        f"`{report['command']}`",
    ]


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    lines = heading(report)
    for found in report["cases"]:
        lines += ["", *case_lines(found)]
    if report.get("skipped"):
        lines += ["", f"Not run, out of time: {', '.join(report['skipped'])}."]
    return "\n".join(lines) + "\n"


def about_case(case: Mapping[str, Any]) -> list[str]:
    """A case's heading and description."""
    size = "" if case["size"] == "full" else f" (size: {case['size']}, only to try the script)"
    return [
        f"## {case['name']}{size}",
        "",
        f"{case['about']}; {case['batch']} x {case['tokens']} tokens, {case['precision']}, "
        f"dropout {case['dropout']}, AdamW.",
    ]


def case_lines(found: Mapping[str, Any]) -> list[str]:
    """A case with its engines; `notes` of the case, if any, are lines of their own."""
    engines, limit = found["engines"], found.get("limit")
    head = ["engine", "ms/step", "of rounds", "tokens/s", "to eager", "to compile"]
    head += ["of limit"] if limit else []
    head += ["first step s", "peak step MiB", "of eager's"]
    lines = [*about_case(found["case"]), "", *markdown(head, _rows(engines, bool(limit))), ""]
    if limit:
        lines.append(f"- {limit_line(limit)}")
    if found.get("largest_batch"):
        lines.append(f"- {_largest_line(found['largest_batch'])}")
    for name, entry in engines.items():
        parts = entry.get("compile_seconds")
        if parts:
            each = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in parts.items())
            lines.append(f"- {name}, seconds of its first step: {each}.")
        predicted = entry.get("predicted_peak_bytes")
        if predicted:
            lines.append(
                f"- {name}, peak that its plan predicts: {predicted / MIB:.0f} MiB; "
                f"native kernels: {entry.get('native', 'none')}."
            )
        if "error" in entry and "step_s" in entry:
            lines.append(f"- {name} failed after its timed steps: {one_line(entry['error'])}.")
    lines += [f"- {note}" for note in found.get("notes", ())]
    lines.append(f"- {checks_line(found['checks'])}")
    return lines


def _rows(engines: Mapping[str, Mapping[str, Any]], limit: bool) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, entry in engines.items():
        if "step_s" not in entry:
            rows.append([name, f"failed: {one_line(entry['error'])}"])
            continue
        memory = ratio(entry, "peak_step_bytes", engines.get("eager"))
        rows.append(
            [
                name,
                f"{entry['step_s'] * 1e3:.1f}",
                f"{entry['round_s_min'] * 1e3:.1f}-{entry['round_s_max'] * 1e3:.1f}",
                f"{entry['tokens_per_s']:.0f}",
                *(
                    "" if share is None else f"{1 / share:.2f}x"
                    for share in (
                        ratio(entry, "step_s", engines.get(peer)) for peer in ("eager", "compile")
                    )
                ),
                *([f"{entry['limit_share']:.1%}"] if limit else []),
                f"{entry['first_step_s']:.2f}",
                f"{entry['peak_step_bytes'] / MIB:.0f}",
                "" if memory is None else f"{memory:.2f}",
            ]
        )
    return rows


def ratio(entry: Mapping[str, Any], key: str, peer: Mapping[str, Any] | None) -> float | None:
    """`entry[key]` as a multiple of the peer's; None where either is missing."""
    if peer is None or not peer.get(key) or not entry.get(key):
        return None
    return entry[key] / peer[key]


def _largest_line(largest: Mapping[str, Mapping[str, Any]]) -> str:
    each = ", ".join(
        f"{name} {'' if found['complete'] else 'at least '}{found['batch']}"
        for name, found in largest.items()
    )
    limit = next(iter(largest.values()))["limit_bytes"]
    line = f"Largest batch whose process stays within {limit / 1e9:.1f} GB, in sequences: {each}"
    whole = all(found["complete"] for found in largest.values())
    mine, peer = (largest.get(name, {}).get("batch") for name in ("onward", "eager"))
    if mine and peer and whole:
        line += f" ({mine / peer:.2f}x eager's)"
    return line + "."


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A table: the first `left` columns read from the left, numbers from the right."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * left}{'---:|' * (len(head) - left)}"]
    for row in rows:
        lines.append(f"| {' | '.join([*row, *[''] * (len(head) - len(row))])} |")
    return lines


def checks_line(checks: Mapping[str, Any]) -> str:
    """How far losses are from eager's, in one line."""
    if not checks["level_difference"]:
        return "Losses were not compared: eager did not finish."
    level = ", ".join(f"{n} {v:.2%}" for n, v in checks["level_difference"].items())
    line = f"Losses {'agree' if checks['passed'] else 'DISAGREE'}; mean loss, from eager's: {level}"
    if checks["exact_difference"]:
        exact = ", ".join(f"{n} {v:.1e}" for n, v in checks["exact_difference"].items())
        kind = "relative difference" if checks.get("relative") else "step difference"
        line += f"; largest {kind} without dropout: {exact}"
    return line + "."


def one_line(text: str) -> str:
    """Short enough for a cell of a table."""
    return " ".join(text.split()).replace("|", "/")[:200]


def write(report: Mapping[str, Any], folder: Path, stem: str, text: str) -> Path:
    """Write `stem`-date.json and, with `text`, .md; returns the path of the text."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{stem}-{report['machine']['date'][:10]}"
    target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    target.with_suffix(".md").write_text(text, encoding="utf-8")
    return target.with_suffix(".md")


def failed(cases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an engine failed or losses disagree anywhere."""
    return any(
        not found["checks"]["passed"] or any("error" in e for e in found["engines"].values())
        for found in cases
    )
