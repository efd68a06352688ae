"""Time training steps of seven model and precision pairs on one GPU, in under nine minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --quick --out DIR   # tiny models: does the script work?

Engines: eager PyTorch with fused AdamW, torch.compile with fused AdamW, Onward. No case starts
after `--budget` seconds; an engine that is still compiling when the time is over is stopped and
named. Results are written after every case, so that a run which is cut short keeps its data.

"peak step" counts the GPU allocator's peak over steady steps less what model and data held just
before the first step. A block of steps is timed as a whole, with one wait at its end.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import ENGINES, Effort, Remote, measure, say
from report import command, failed, machine, table, write
from workloads import Case

# In order of worth: what a slow machine has no time for is at the end.
CASES = (
    Case("GPT-2 medium, bf16", "gpt2_medium", batch=8, tokens=1024, precision="bf16"),
    Case("BERT-large 128, bf16", "bert_large", batch=64, tokens=128, precision="bf16"),
    Case("BERT-large 512, bf16", "bert_large", batch=16, tokens=512, precision="bf16"),
    Case("tutorial transformer, fp32", "tutorial", batch=20, tokens=35, dropout=0.2),
    Case("two towers, tf32", "two_tower", batch=64, tokens=64, precision="tf32"),
    Case("GPT-2 medium, tf32", "gpt2_medium", batch=8, tokens=1024, precision="tf32"),
    Case("GPT-2 medium, fp32", "gpt2_medium", batch=8, tokens=1024, precision="fp32"),
)

# Fused AdamW is what PyTorch recommends on a GPU, so that both peers get it.
PEERS = {
    "eager": replace(ENGINES["eager"], fused=True, about="PyTorch, fused AdamW"),
    "compile": replace(ENGINES["compile"], fused=True, about="torch.compile(model), fused AdamW"),
    "onward": ENGINES["onward"],
}


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round and engine")
    parser.add_argument("--rounds", type=int, default=3, help="turns that every engine gets")
    parser.add_argument("--engines", default=",".join(PEERS), help="comma-separated")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds; then nothing starts")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = options.engines.split(",")
    if unknown := sorted(set(names) - set(PEERS)):
        parser.error(f"no such engine: {', '.join(unknown)}; there are {', '.join(PEERS)}")

    begin = time.monotonic()
    hard_end = begin + options.budget + 30.0  # what has started may take this much longer

    def seconds_left() -> float:
        return hard_end - time.monotonic()

    effort = Effort(
        rounds=options.rounds,
        steps=options.steps,
        warmup=3,
        exact_steps=0,  # the CPU benchmark compares step by step; here time is short
        level_tolerance=0.05,
    )
    cases = [_tiny(case) for case in CASES] if options.quick else list(CASES)
    cases = [case for case in cases if options.cases in case.name]
    stem = "gpu" if options.device == "cuda" else "gpu-script-on-cpu"
    report: dict[str, Any] = {
        "title": "Training steps on one GPU",
        "command": command(),
        "machine": machine(options.device),
        "settings": {"steps": effort.steps, "rounds": effort.rounds, "warmup": effort.warmup},
        "cases": [],
        "skipped": [],
    }
    remotes: dict[str, Remote] = {}
    path = options.out
    try:
        for case in cases:
            if time.monotonic() - begin > options.budget:
                report["skipped"].append(case.name)
            else:
                for name in names:  # started on first use, and again after a crash or a timeout
                    if name not in remotes or not remotes[name].alive:
                        remotes[name] = Remote(PEERS[name], options.device)
                report["cases"].append(measure(case, remotes, effort, seconds_left))
            full = f"{stem}-quick" if options.quick else stem
            path = write(report, options.out, full, table(report))
    finally:
        for remote in remotes.values():
            remote.close()
    say(f"\n{table(report)}\nwritten: {path}, {time.monotonic() - begin:.0f} s")
    return int(failed(report["cases"]))


def _tiny(case: Case) -> Case:
    batch = 16 if case.model == "two_tower" else 2  # two pairs are too few for a steady loss
    return replace(case, size="tiny", batch=batch, tokens=32)


if __name__ == "__main__":
    sys.exit(main())
