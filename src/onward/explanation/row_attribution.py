"""Computes a RowReport: for the rows of one batch, what computes and what keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from onward.explanation.row_report import KeptRows, RowReport, RowSet
from onward.graph.graph import Graph
from onward.prepare.batch import Batch
from onward.prepare.prepared_step import PreparedStep
from onward.rewrite import Attribution, attribute

Attribute = Callable[[tuple[str, ...]], Attribution]  # takes reasons to ignore
# runs a graph on the batch and returns its masks b[rows]
Conditions = Callable[[Graph], "dict[str, torch.Tensor]"]


def row_report(step: PreparedStep[Any], batch: Batch, results: tuple[str, ...]) -> RowReport:
    """Reports what row demand does with a batch, for a step that computes these results."""
    dims, staged = step.sizes(batch), step.staged(batch)
    packed, quiet = step.packed(results), step.graphs.compiler.here.quiet()

    def conditions(graph: Graph) -> dict[str, torch.Tensor]:
        plan = quiet.plan(graph, graph.outputs, dims)
        executable = step.session.bind(quiet, step.graphs, plan)
        executable.run(staged)
        return {name: executable.output(name) for name in graph.outputs}

    pays = False
    if packed is not None:
        rows = packed.rows.of(staged, dims)
        pays = packed.pays(dims | {size: len(numbers) for size, numbers in rows.items()})
    forward = step.graphs.forward
    outputs = forward.signature.requested(results, None)
    return _report(partial(attribute, forward, outputs), conditions, dims, pays)


def _report(
    attributed: Attribute, conditions: Conditions, dims: Mapping[str, int], packed: bool
) -> RowReport:
    """Makes the report of the batch that `conditions` runs graphs on."""
    attribution = attributed(())
    found = conditions(attribution.conditions)
    present = _shares(found)
    done = attribution.flops(present, dims)
    everything = attribution.flops(dict.fromkeys(present, 1.0), dims)
    whole = dict.fromkeys(e.module for e in attribution.entries if e.rows is None)
    sets = _row_sets(attribution, found, dims)
    whys = tuple(dict.fromkeys(why for e in attribution.entries for why in e.whys))

    def spared(without: tuple[str, ...]) -> float:
        other = attributed(without)
        shares = _shares(conditions(other.conditions))
        return 1 - other.flops(shares, dims) / done if done else 0.0

    kept = [KeptRows(why, spared((why,))) for why in whys]
    together = spared(whys) if len(whys) > 1 else sum(k.more for k in kept)
    return RowReport(sets, tuple(whole), kept, done, everything, packed, together)


def _row_sets(
    attribution: Attribution, found: Mapping[str, torch.Tensor], dims: Mapping[str, int]
) -> list[RowSet]:
    """The sets of rows that modules compute; sets that are equal in this batch are merged."""
    users: dict[str, dict[str, None]] = {name: {} for name in found}
    for entry in attribution.entries:
        if entry.rows is not None:
            users[entry.rows][entry.module] = None
    sets: list[RowSet] = []
    for name, modules in users.items():
        sizes = [n if isinstance(n, int) else n.number(dims) for n in attribution.sizes[name]]
        rows = found[name].reshape(sizes)
        same = next((s for s in sets if torch.equal(s.present, rows)), None)
        if same is not None:
            sets = [s for s in sets if s is not same]
            modules = {**dict.fromkeys(same.modules), **modules}
        if modules:
            sets.append(RowSet(rows, tuple(modules)))
    return sets


def _shares(found: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The share of rows in each mask `b[rows]`."""
    return {name: float(c.float().mean()) if c.numel() else 0.0 for name, c in found.items()}


__all__ = ["row_report"]
