"""`onward simulate`: the fastest layouts of a step on a cluster that is described."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from onward.errors import OnwardError
from onward.recipes.options import InputError
from onward.recipes.simulate_options import SimulateConfig, check_simulate
from onward.simulate import (
    PRESETS,
    Cluster,
    StepEstimate,
    Transformer,
    best_layouts,
    built_in,
    read_cluster,
)
from onward.simulate.cluster import BUILT_IN
from onward.simulate.goodput import goodput


def simulate(cluster_name: str, config: SimulateConfig) -> int:
    """Prints the layouts; returns the exit status. Raises OnwardError for what cannot be."""
    check_simulate(config)
    cluster = cluster_of(cluster_name)
    model = model_of(config)
    ranks = config.ranks or cluster.per_node
    batch = config.batch or 2 * ranks
    tokens = config.seq or model.tokens
    given = {**config.fixed, "dtype": config.dtype}
    try:
        found = best_layouts(model, cluster, ranks, batch, tokens, config.top, **given)
    except InputError:
        raise
    except OnwardError as error:
        raise InputError(*_parts(str(error))) from error
    if config.json:
        print(json.dumps([facts(step) for step in found], indent=1))
        return 0
    print(
        f"{model.parameters / 1e9:.2f} B parameters, batch {batch} x {tokens} tokens, {ranks} "
        f"ranks of {cluster.name} ({cluster.per_node} a node), {config.dtype}"
    )
    for line in table(found):
        print(line)
    return 0


def _parts(text: str) -> tuple[str, str, str]:
    what, _, fix = text.partition("; fix: ")
    return what, "on the command line", fix or "see --help"


def cluster_of(name: str) -> Cluster:
    """A built-in cluster, or the one that a file describes."""
    if name in BUILT_IN:
        return built_in(name)
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json") or path.exists():
        return read_cluster(path)
    return built_in(name)


def model_of(config: SimulateConfig) -> Transformer:
    """The model that the options name or describe. Raises InputError for an unknown name."""
    if config.model is not None:
        if config.model not in PRESETS:
            raise InputError(
                f"no model {config.model!r}", "in --model", f"one of {', '.join(PRESETS)}"
            )
        return PRESETS[config.model]
    assert config.hidden and config.layers and config.heads
    tokens = config.seq or 2048
    return Transformer(
        config.hidden, config.layers, config.heads, config.vocab or 50257, positions=tokens,
        tokens=tokens,
    )  # fmt: skip


def facts(step: StepEstimate) -> dict[str, Any]:
    """What is known of an estimated step, as JSON."""
    run = goodput(step)
    return {
        "layout": dataclasses.asdict(step.layout),
        "seconds": step.seconds,
        "mfu": step.mfu,
        "flops_per_device": step.flops_per_device,
        "tokens_per_second": step.tokens_per_second,
        "bubble": step.bubble,
        "memory_bytes": {**dataclasses.asdict(step.memory), "total": step.memory.total},
        "goodput": run.share,
        "checkpoint_interval_seconds": None if math.isinf(run.interval) else run.interval,
    }


def table(steps: list[StepEstimate]) -> list[str]:
    """One line for each step, under a heading."""
    head = ("seconds", "MFU", "GiB", "tokens/s", "goodput", "layout")
    lines = [" ".join(f"{word:>10}" for word in head[:-1]) + f"  {head[-1]}"]
    for step in steps:
        cells = (
            f"{step.seconds:.4g}", f"{step.mfu:.1%}", f"{step.memory.total / 2**30:.1f}",
            f"{step.tokens_per_second:,.0f}", f"{goodput(step).share:.2%}",
        )  # fmt: skip
        lines.append(" ".join(f"{cell:>10}" for cell in cells) + f"  {step.layout}")
    return lines


__all__ = ["cluster_of", "facts", "model_of", "simulate", "table"]
