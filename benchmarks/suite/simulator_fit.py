"""Four constants of a kind of machine, by least squares over the rows that are there to be fitted.

Residuals are logarithms of predicted over measured seconds, each row once; four more hold each
constant weakly at calculon's value, so that one which no row depends on stays there: a constant
that is off by a factor of e weighs as much as a row that is off by 5 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace

import numpy as np

from onward.simulate import Cluster, MeshLayout, StepEstimate, built_in, estimate
from onward.simulate.cluster import Efficiency
from suite.published_row import FIT, PublishedStep

# The kinds of machines, and the clusters of each.
KINDS: Mapping[str, tuple[str, ...]] = {
    "a100": ("a100-80", "a100-40"),
    "h100": ("h100", "h100-500w"),
}
PRIOR = Efficiency(gemm=0.95, memory=0.9, in_node=0.65, across=0.9)
WEIGHT = 0.05


def with_constants(cluster: str, constants: Mapping[str, Efficiency]) -> Cluster:
    """A built-in cluster with the constants of its kind of machine."""
    kind = next(kind for kind, names in KINDS.items() if cluster in names)
    return replace(built_in(cluster), efficiency=constants[kind])


def chosen(row: PublishedStep, cluster: Cluster) -> MeshLayout:
    """The row's layout; where its source leaves something open, the fastest choice that fits, or
    the smallest where none does."""
    if not row.free:
        return row.layout
    found: list[StepEstimate] = []
    for values in itertools.product(*row.free.values()):
        layout = replace(row.layout, **dict(zip(row.free, values, strict=True)))
        schedule = "Interleaved1F1B" if layout.chunks > 1 else "1F1B"
        layout = replace(layout, schedule=schedule)
        if not layout.refusal(row.model, row.batch, row.tokens):
            found.append(estimate(row.model, layout, cluster, row.batch, row.tokens))
    fitting = [each for each in found if each.fits]
    if not fitting:
        return min(found, key=lambda each: each.memory.total).layout
    return min(fitting, key=lambda each: each.seconds).layout


def predicted(row: PublishedStep, layout: MeshLayout, cluster: Cluster) -> StepEstimate:
    """The estimate of a row's step."""
    return estimate(row.model, layout, cluster, row.batch, row.tokens)


def fit(rows: Iterable[PublishedStep], kind: str) -> Efficiency:
    """The constants of a kind of machine, from the rows of the fitted half alone.

    What sources leave open is chosen with the constants so far, twice; two steps of Gauss and
    Newton follow each time.
    """
    mine = [row for row in rows if row.half == FIT and row.cluster in KINDS[kind]]
    constants = PRIOR
    for _ in range(2):
        layouts = [chosen(row, _cluster(row, constants)) for row in mine]
        for _ in range(2):
            constants = _step(mine, layouts, constants)
    return constants


def _cluster(row: PublishedStep, constants: Efficiency) -> Cluster:
    return replace(built_in(row.cluster), efficiency=constants)


def _residuals(
    rows: Sequence[PublishedStep], layouts: Sequence[MeshLayout], constants: Efficiency
) -> np.ndarray:
    pairs = zip(rows, layouts, strict=True)
    errors = [
        math.log(predicted(row, layout, _cluster(row, constants)).seconds / row.seconds)
        for row, layout in pairs
    ]
    held = [
        WEIGHT * math.log(a / b) for a, b in zip(astuple(constants), astuple(PRIOR), strict=True)
    ]
    return np.array([*errors, *held])


def _step(
    rows: Sequence[PublishedStep], layouts: Sequence[MeshLayout], constants: Efficiency
) -> Efficiency:
    """One step in the logarithms of the constants, of which none is above 1."""
    at = np.log(astuple(constants))
    here = _residuals(rows, layouts, constants)
    slopes = []
    for i in range(len(at)):
        moved = at.copy()
        moved[i] -= 0.02
        there = _residuals(rows, layouts, Efficiency(*np.exp(moved).tolist()))
        slopes.append((here - there) / 0.02)
    move = np.linalg.lstsq(np.array(slopes).T, -here, rcond=None)[0]
    return Efficiency(*np.exp(np.minimum(at + move, 0.0)).tolist())


__all__ = ["KINDS", "PRIOR", "chosen", "fit", "predicted", "with_constants"]
