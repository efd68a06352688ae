"""Training steps as ONNX files that stock onnxruntime runs: Onward's beside onnxsim's.

    pip install onnxsim==0.8.1 onnxscript
    python benchmarks/portable_training.py

For tiny models: whether a step is made at all, how fast it runs, and how far 20 losses are from
those of eager PyTorch with the same Adam. onnxsim is given each model in turn as it is, easier
(eager attention, no tied weights), and with a loss by squares in place of cross entropy, the two
last also behind its own simplifier; what it trains first counts, and is then given to Onward as
well. Dropout is 0 everywhere: onnxsim leaves it out. Without onnxsim its column is empty.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from suite import portable_peers as peers
from suite.cli import CommandLine, finished, writer
from suite.portable_peers import PortableCase
from suite.progress import Clock, say
from suite.report import heading, markdown, one_line, started

INTRODUCTION = "Difference: the largest of 20 losses from eager's. Build: with the first step."


def attempts(case: PortableCase) -> dict[str, tuple[bool, Any, dict[str, Any]]]:
    """The spellings in which onnxsim is given a model: whether its simplifier runs first, the loss,
    and settings of the model."""
    easier = dict(case.easier)
    return {
        "as it is": (False, case.loss, {}),
        "easier": (False, case.loss, easier),
        "easier, simplified": (True, case.loss, easier),
        "a loss by squares": (False, peers.squared, easier),
        "a loss by squares, simplified": (True, peers.squared, easier),
    }


def row(case: PortableCase, peer: bool) -> dict[str, Any]:
    """Both engines on one model."""
    say(f"{case.name} ...")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make = partial(peers.by_onward, case, place / "as it is", case.loss)
        ours = {"as it is": peers.measured(make, case, case.loss)}
        tries = {}
        for words, (simplified, loss, more) in attempts(case).items() if peer else ():
            make = partial(peers.by_onnxsim, case, simplified, loss, **more)
            tries[words] = peers.measured(make, case, loss, **more)
            if "refused" in tries[words]:
                continue
            if words not in ours:
                make = partial(peers.by_onward, case, place / words, loss, **more)
                ours[words] = peers.measured(make, case, loss, **more)
            break
    return {"model": case.name, "onward": ours, "onnxsim": tries}


def main() -> int:
    """Run the benchmark; see the module's text."""
    options = CommandLine(__doc__, budget=1200.0, cases=True, threads=True).read()
    cases = [c for c in peers.CASES if any(part in c.name for part in options.cases.split(","))]
    cases = cases[:2] if options.quick else cases
    if options.threads:
        torch.set_num_threads(options.threads)
    peer = importlib.util.find_spec("onnxsim") is not None
    clock = Clock(options.budget)
    report = started("Training steps as ONNX files", threads=options.threads)
    if peer:
        report["machine"]["versions"]["onnxsim"] = importlib.metadata.version("onnxsim")
    report["rows"] = [row(case, peer) for case in cases if not clock.over()]
    finished(text(report), writer(options, "portable_training")(report, text(report)), clock)
    return 0


def text(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    rows, refused = [], []
    for found in report["rows"]:
        for words, ours in found["onward"].items():
            rows.append([found["model"], "Onward", words, *figures(ours)])
        for words, tried in found["onnxsim"].items():
            rows.append([found["model"], "onnxsim", words, *figures(tried)])
            if "refused" in tried:
                refused.append(f"- {found['model']}, {words}: {one_line(tried['refused'])}")
    head = ["model", "engine", "spelling", "build, s", "steps/s", "difference"]
    lines = [*heading(report), "", INTRODUCTION, "", *markdown(head, rows, left=3)]
    if refused:
        lines += ["", "Refusals of onnxsim:", "", *refused]
    return "\n".join(lines) + "\n"


def figures(found: dict[str, Any]) -> list[str]:
    """The cells of one engine on one model."""
    if "refused" in found:
        return ["refused", "", ""]
    speed = f"{found['steps_per_s']:.1f}"
    return [f"{found['built_s']:.1f}", speed, f"{found['difference']:.0e}"]


if __name__ == "__main__":
    sys.exit(main())
