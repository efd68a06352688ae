"""The analysis behind `Trainer.explain`: the rows of one batch, by what computes and keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from onward.graph.graph import Graph
from onward.prepare.row_explanation import Explanation, Kept, RowSet
from onward.rewrite import Attribution

Attribute = Callable[[tuple[str, ...]], Attribution]  # the attribution without some reasons
Conditions = Callable[[Graph], "dict[str, torch.Tensor]"]  # a graph's b[rows] for the batch


def explain(
    attribute: Attribute, conditions: Conditions, dims: Mapping[str, int], packed: bool
) -> Explanation:
    """What row demand does with the batch that `conditions` runs a graph on."""
    attribution = attribute(())
    found = conditions(attribution.conditions)
    present = _shares(found)
    done = attribution.flops(present, dims)
    everything = attribution.flops(dict.fromkeys(present, 1.0), dims)
    whole = dict.fromkeys(e.module for e in attribution.entries if e.rows is None)
    sets = _row_sets(attribution, found, dims)
    whys = tuple(dict.fromkeys(why for e in attribution.entries for why in e.whys))

    def spared(without: tuple[str, ...]) -> float:
        other = attribute(without)
        shares = _shares(conditions(other.conditions))
        return 1 - other.flops(shares, dims) / done if done else 0.0

    kept = [Kept(why, spared((why,))) for why in whys]
    together = spared(whys) if len(whys) > 1 else sum(k.more for k in kept)
    return Explanation(sets, tuple(whole), kept, done, everything, packed, together)


def _row_sets(
    attribution: Attribution, found: Mapping[str, torch.Tensor], dims: Mapping[str, int]
) -> list[RowSet]:
    """The sets of rows that some module computes; those that are one in this batch together."""
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
    """The share of rows that each `b[rows]` holds."""
    return {name: float(c.float().mean()) if c.numel() else 0.0 for name, c in found.items()}
