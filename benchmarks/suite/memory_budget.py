"""What a memory budget costs: time of a step at fractions of its unconstrained peak.

Processor time on one thread, the smallest of several steps, the budgets in turn; that is steady on
a machine which others use too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import onward
from suite.engines import LEARNING_RATE
from suite.progress import say
from suite.report import MIB, Writer, heading, markdown, one_line, started


@dataclass(frozen=True)
class Size:
    """GPT-2 and its batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int


# Most of its memory is what forward keeps for backward.
FULL = Size(8, 256, 4, vocabulary=1000, batch=8, tokens=256)
QUICK = Size(4, 64, 2, vocabulary=100, batch=8, tokens=64)
FRACTIONS = (0.8, 0.6, 0.5, 0.4, 0.3)


def run(
    size: Size, fractions: Sequence[float], steps: int, write: Writer
) -> tuple[dict[str, Any], Path]:
    """The report. A budget that cannot be met is a row that says why."""
    torch.set_num_threads(1)
    report = started("What a memory budget costs") | {"size": asdict(size), "rows": []}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size.vocabulary, (size.batch, size.tokens), generator=generator)
    data = {"input_ids": ids, "labels": ids}
    trainers: dict[float, onward.Trainer] = {1.0: _trainer(size, None)}
    first = {1.0: float(trainers[1.0].train_step(data).loss)}
    whole = trainers[1.0].plan.peak
    errors: dict[float, str] = {}
    for fraction in fractions:
        trainer = _trainer(size, int(fraction * whole))
        try:
            first[fraction] = float(trainer.train_step(data).loss)
        except onward.OnwardError as error:
            errors[fraction] = str(error)
            say(f"{fraction}: {error}")
        else:
            trainers[fraction] = trainer
    best = dict.fromkeys(trainers, float("inf"))
    for _ in range(steps):
        for fraction, trainer in trainers.items():
            start = time.process_time()
            trainer.train_step(data)
            best[fraction] = min(best[fraction], time.process_time() - start)
    for fraction, trainer in trainers.items():
        plan, stages = trainer.plan, trainer.report()["compile_seconds"]
        report["rows"].append(
            {
                "budget": fraction, "peak_bytes": plan.peak, "peak_share": plan.peak / whole,
                "step_s": best[fraction], "slower": best[fraction] / best[1.0],
                "launches": len(plan.launches), "search_s": stages.get("recompute", 0.0),
                "first_loss": first[fraction],
            }
        )  # fmt: skip
    report["rows"] += [{"budget": fraction, "error": error} for fraction, error in errors.items()]
    return report, write(report, table(report))


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    size = report["size"]
    head = ["budget", "peak MiB", "of unconstrained", "step ms", "slower", "launches", "search s"]
    rows = [
        [str(row["budget"]), f"refused: {one_line(row['error'])}"]
        if "error" in row
        else [
            str(row["budget"]), f"{row['peak_bytes'] / MIB:.0f}", f"{row['peak_share']:.3f}",
            f"{row['step_s'] * 1e3:.0f}", f"{row['slower']:.2f}x", str(row["launches"]),
            f"{row['search_s']:.2f}",
        ]
        for row in report["rows"]
    ]  # fmt: skip
    about = (
        f"GPT-2, {size['layers']} layers, {size['width']} wide, vocabulary {size['vocabulary']}, "
        f"{size['batch']} sequences of {size['tokens']} tokens, dropout on, AdamW; one thread, "
        "processor time."
    )
    return "\n".join([*heading(report), "", about, "", *markdown(head, rows)]) + "\n"


def gpt2(size: Size) -> Any:
    """The model with random weights, the same for a size."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=size.layers, n_embd=size.width, n_head=size.heads, n_positions=size.tokens,
        vocab_size=size.vocabulary, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def _trainer(size: Size, budget: int | None) -> onward.Trainer:
    options = onward.TrainerOptions(seed=1, memory_budget=budget)
    return onward.Trainer(gpt2(size), onward.optim.AdamW(lr=LEARNING_RATE), options=options)
