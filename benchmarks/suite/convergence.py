"""Training with eager PyTorch and with Onward to the same loss.

Equal initial weights, equal batches in equal order, AdamW with warm-up and linear decay (which
takes noise out of the end). The dropout masks are equal in distribution only, so the runs end
apart; how far apart that alone takes them is measured as well, by a second eager run with other
masks. Then the same run without dropout, step by step: eager and Onward in fp32, each against eager
in fp64, which says whose rounding it was.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import onward
from suite.convergence_report import table
from suite.held_out_text import Data
from suite.progress import Clock, say
from suite.report import Writer, started


@dataclass(frozen=True)
class Size:
    """The model and the run. `vocabulary` counts the unknown token."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    steps: int
    warmup: int
    eval_batches: int
    exact_steps: int
    learning_rate: float = 1e-3
    dropout: float = 0.1


FULL = Size(4, 192, 6, 4096, batch=8, tokens=128, steps=200, warmup=20, eval_batches=16,
            exact_steps=100)  # fmt: skip
QUICK = Size(2, 32, 2, 256, batch=4, tokens=32, steps=12, warmup=4, eval_batches=4,
             exact_steps=10)  # fmt: skip

# The last is eager once more with other masks: what masks alone do.
ENGINES = ("eager", "onward", "eager, other masks")
DOUBLE = "eager, fp64"
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def engines_in(precision: str | None) -> tuple[str, ...]:
    """Names of the engines to compare: with a precision, eager in fp32 beside three engines in that
    precision."""
    if precision is None:
        return ENGINES
    return ("eager", *(f"{name}, {precision}" for name in ("eager", "onward", "accelerated")))


def trained(engine: str, seed: int, size: Size, data: Data) -> dict[str, Any]:
    """One run: the evaluation loss before and after, the training losses, seconds."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=size.layers, n_embd=size.width, n_head=size.heads, vocab_size=size.vocabulary,
        n_positions=size.tokens, resid_pdrop=size.dropout, embd_pdrop=size.dropout,
        attn_pdrop=size.dropout, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    name, _, precision = engine.partition(", ")
    if engine == DOUBLE:
        model.double()
    autocast = torch.autocast(
        "cpu", LOW.get(precision, torch.bfloat16), enabled=precision in LOW and name != "onward"
    )
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16" and name != "onward")
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    before = evaluated(model, data, size)
    order = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed + (7000 if "other masks" in engine else 5000))
    trainer = None
    if name == "onward":
        mixed = precision if precision in LOW else "no"
        trainer = onward.Trainer(model, optimizer, options={"mixed_precision": mixed})
    elif name == "accelerated":
        onward.accelerate(model, strict=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / size.warmup, (size.steps - step) / (size.steps - size.warmup)
        ),
    )
    losses: list[float] = []
    begin = time.perf_counter()
    for step in range(size.steps):
        ids = data.batch(size.batch, size.tokens, order)
        if trainer is not None:
            loss = trainer.train_step(input_ids=ids, labels=ids).loss
        else:
            optimizer.zero_grad(set_to_none=True)
            with autocast:
                loss = model(input_ids=ids, labels=ids).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        losses.append(float(loss.detach()))
        if (step + 1) % 50 == 0:
            mean = statistics.fmean(losses[-50:])
            say(f"  {engine}, seed {seed}: step {step + 1}, loss {mean:.4f}")
    seconds = time.perf_counter() - begin
    return {
        "seed": seed, "before": before, "eval_loss": evaluated(model, data, size),
        "train_losses": losses, "seconds": seconds,
    }  # fmt: skip


def evaluated(model: torch.nn.Module, data: Data, size: Size) -> float:
    """Mean loss on the held-out windows, by eager PyTorch, without dropout."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad(), onward.eager():
        for ids in data.evaluation_batches(size.eval_batches, size.batch, size.tokens):
            total += float(model(input_ids=ids, labels=ids).loss) * len(ids)
            count += len(ids)
    model.train()
    return total / count


def step_by_step(size: Size, data: Data) -> dict[str, Any]:
    """Distances of fp32 losses to fp64's, relative, without dropout and from equal weights."""
    exact = replace(size, dropout=0.0, steps=size.exact_steps, warmup=size.exact_steps // 5)
    losses = {
        engine: trained(engine, 0, exact, data)["train_losses"]
        for engine in (DOUBLE, "eager", "onward")
    }
    want = losses.pop(DOUBLE)
    return {
        engine: [abs(a - b) / abs(b) for a, b in zip(made, want, strict=True)]
        for engine, made in losses.items()
    }


def compared(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each engine against eager over the seeds that both have."""
    eager = {run["seed"]: run["eval_loss"] for run in runs["eager"]}
    result: dict[str, dict[str, Any]] = {}
    for engine, made in runs.items():
        own = {run["seed"]: run["eval_loss"] for run in made if run["seed"] in eager}
        if not own:
            continue
        peer = statistics.fmean(eager[seed] for seed in own)
        result[engine] = {
            "mean": statistics.fmean(own.values()),
            "mean_difference": (statistics.fmean(own.values()) - peer) / peer,
            "seed_difference": {
                seed: (loss - eager[seed]) / eager[seed] for seed, loss in own.items()
            },
        }
    return result


def run(
    size: Size, data: Data, seeds: int, clock: Clock, write: Writer, precision: str | None = None
) -> tuple[dict[str, Any], Path]:
    """The report, written after every run."""
    engines = engines_in(precision)
    report = started("Training to the same loss") | {
        "size": asdict(size),
        "data": {"source": data.source, "train": len(data.train), "unknown": data.unknown},
        "runs": {engine: [] for engine in engines}, "compared": {}, "exact": {}, "skipped": [],
        "precision": precision,
    }  # fmt: skip
    path = write.folder
    for seed in range(seeds):
        if clock.over():
            report["skipped"].append(seed)
            continue
        for engine in engines:
            made = trained(engine, seed, size, data)
            report["runs"][engine].append(made)
            say(f"{engine}, seed {seed}: evaluation loss {made['eval_loss']:.4f}")
            report["compared"] = compared(report["runs"])
            path = write(report, table(report))
    if precision is None and not clock.over():
        report["exact"] = step_by_step(size, data)
        path = write(report, table(report))
    return report, path
