"""Train a small GPT-2 on real text with eager PyTorch and with Onward, and compare where they end.

    python benchmarks/convergence.py           # under ten minutes on two cores
    python benchmarks/convergence.py --text wiki.train.tokens --eval wiki.valid.tokens
    python benchmarks/convergence.py --quick   # a tiny model

For each of three seeds: equal initial weights, equal batches in equal order, 200 steps of AdamW
with warm-up and linear decay, dropout 0.1. Every model is evaluated by eager PyTorch on text it was
not trained on: the mean loss in nats per token. Exit status 1: the mean over seeds differs from
eager's by more than 0.5 %.

    python benchmarks/convergence.py --precision bf16

trains in mixed precision too: eager under `torch.autocast`, `onward.Trainer` and an accelerated
model under autocast, beside eager in fp32. Exit status 1: the mean of one of Onward's is above
fp32's by more than 0.3 %, or above autocast's by more than 0.2 %.

In fp32 the same run follows without dropout, step by step: eager and Onward, each against eager in
fp64. AdamW divides by the root of a gradient's square, so that rounding in small gradients grows to
differences in the loss; the fp64 run says whose rounding it was.

The text is the language reference that Python's pydoc carries unless `--text` names a file; its end
is held out unless `--eval` names another. On the reference single runs of either engine end on one
of two levels, 6 % apart, as chance has it; WikiText-2 (validation to train on, test to evaluate on)
leaves 0.1 %. Results are written after every run; no seed starts after `--budget` seconds.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from suite.cli import CommandLine, finished, writer
from suite.convergence import FULL, QUICK, run
from suite.convergence_report import agrees, table
from suite.held_out_text import read
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, budget=600.0, threads=True)
    line.add_argument("--text", type=Path, help="training text; default: pydoc's topics")
    line.add_argument("--eval", type=Path, help="held-out text; default: the end of --text")
    line.add_argument("--seeds", type=int, default=0, help="default: 3, with --quick 1")
    line.add_argument("--precision", choices=["bf16", "fp16"], help="default: fp32 alone")
    line.add_argument("--steps", type=int, default=0, help="AdamW steps of a run; default: 200")
    options = line.read()
    if options.eval is not None and options.text is None:
        line.error("--eval needs --text")
    if options.threads:
        torch.set_num_threads(options.threads)
    size = QUICK if options.quick else FULL
    if options.steps:
        size = replace(size, steps=options.steps)
    clock = Clock(options.budget)
    try:
        data = read(options.text, options.eval, size.vocabulary)
    except (OSError, UnicodeDecodeError) as error:
        line.error(f"{error}; fix: a UTF-8 text file for --text and --eval")
    seeds = options.seeds or (1 if options.quick else 3)
    write = writer(options, "convergence")
    report, path = run(size, data, seeds, clock, write, options.precision)
    finished(table(report), path, clock)
    return int(not agrees(report))


if __name__ == "__main__":
    sys.exit(main())
