"""A model whose weights, gradients and moments eager PyTorch cannot hold, in a step that can."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

import onward
from suite.held_out_text import read
from suite.memory import Memory
from suite.memory_budget import Size, gpt2
from suite.progress import say
from suite.report import MIB, heading, markdown, started

NARROW = 500  # tokens of a narrow model's vocabulary
EAGER = 16  # bytes of a weight: itself, its gradient and two moments, in fp32


FULL = Size(48, 1600, 25, vocabulary=50257, batch=1, tokens=512)
QUICK = Size(2, 64, 2, vocabulary=500, batch=2, tokens=512)


def run(size: Size, steps: int, threads: int) -> dict[str, Any]:
    """The report: so many updates of a model of this size."""
    report = started("A model that eager PyTorch cannot hold", threads=threads)
    return report | {"size": asdict(size), **measured(size, steps)}


def measured(size: Size, steps: int) -> dict[str, Any]:
    """The predicted and the measured memory of a step, and losses and seconds of all steps."""
    data = read(None, None, size.vocabulary)
    generator = torch.Generator().manual_seed(0)
    batches = [data.batch(size.batch, size.tokens, generator) for _ in range(steps)]
    memory = Memory("cpu")
    start = memory.now()
    # imports, modules, and what capturing and planning so many layers leaves
    narrow = replace(size, width=2 * size.heads, vocabulary=NARROW)
    ids = [batch % NARROW for batch in batches[:2]]
    narrow_trainer = trainer_of(gpt2(narrow))
    for batch in ids:
        narrow_trainer.train_step(input_ids=batch, labels=batch)
    before = memory.now()
    model = gpt2(size)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{parameters / 1e6:.0f} M weights, {(memory.now() - before) / MIB:.0f} MiB")
    trainer = trainer_of(model)
    given = [{"input_ids": ids, "labels": ids} for ids in batches]
    facts = trainer.explain(given[0])
    assert facts.memory is not None, "GPT-2 is captured"
    rows: list[dict[str, float]] = []
    memory.reset_peak()
    first_peak = 0
    for number, batch in enumerate(given):
        start = time.perf_counter()
        loss = float(trainer.train_step(batch).loss)
        rows.append({"loss": loss, "seconds": time.perf_counter() - start})
        say(f"update {number + 1}: loss {loss:.4f}, {rows[-1]['seconds']:.1f} s")
        if number == 0:
            first_peak = memory.peak()
            memory.reset_peak()
    return {
        "parameters": parameters,
        "runtime_bytes": before - start,
        "predicted_bytes": facts.memory.total,
        "kinds": {kind: n for kind, n in facts.memory.kinds.items() if n},
        "measured_bytes": memory.peak() - before,
        "process_peak_bytes": max(memory.peak(), first_peak),
        "eager_state_bytes": EAGER * parameters,
        "source": data.source,
        "steps": rows,
    }


def trainer_of(model: Any) -> onward.Trainer:
    """A Trainer that takes little memory."""
    options = onward.TrainerOptions(
        mixed_precision="bf16", optimizer_state="8bit", recompute="layers", seed=1,
        skip_nonfinite=False,
    )  # fmt: skip
    return onward.Trainer(model, onward.optim.AdamW(lr=2e-5), options=options)


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    size = report["size"]
    about = (
        f"GPT-2, {report['parameters'] / 1e6:.0f} M weights ({size['layers']} layers, "
        f"{size['width']} wide, vocabulary {size['vocabulary']}) from random ones, "
        f"{size['batch']} sequences of {size['tokens']} tokens of {report['source']}, dropout 0.1, "
        "AdamW; bf16, moments in 8 bits, layers computed again, each weight updated as soon as its "
        "gradient is known (`skip_nonfinite=False`)."
    )
    measured, predicted = report["measured_bytes"], report["predicted_bytes"]
    memory = [
        ["eager PyTorch: weights, gradients and moments alone", f"{report['eager_state_bytes']}"],
        ["Onward's step, predicted before it", f"{predicted}"],
        ["Onward's step, measured", f"{measured}"],
        ["modules, graphs and what compiling leaves", f"{report['runtime_bytes']}"],
        ["the whole process at its fullest, compilation too", f"{report['process_peak_bytes']}"],
    ]
    memory = [[what, f"{float(n) / MIB:.0f}"] for what, n in memory]
    kinds = [[kind, f"{n / MIB:.0f}"] for kind, n in report["kinds"].items() if n > MIB]
    steps = [
        [str(i), f"{row['loss']:.4f}", f"{row['seconds']:.1f}"]
        for i, row in enumerate(report["steps"], 1)
    ]
    return "\n".join(
        [
            *heading(report), "", about, "",
            *markdown(["memory", "MiB"], memory), "",
            f"Measured over predicted: {measured / predicted:.4f}. The measured one is the "
            "highest resident set in the updates after the first, less that after two updates of a "
            "narrow model of as many layers.", "",
            *markdown(["predicted kind", "MiB"], kinds), "",
            *markdown(["update", "loss", "s"], steps), "",
        ]
    )  # fmt: skip
