"""Training steps on clusters that are described, not there: step time, memory, goodput.

In: a `Cluster`, a `Transformer`, a `MeshLayout`, a batch. Out: a `StepEstimate`. Imports: graphs,
for the launches of a plan. Plain arithmetic, no torch.
"""

from __future__ import annotations

from onward.simulate.cluster import Cluster, built_in, read_cluster
from onward.simulate.layout import MeshLayout
from onward.simulate.search import best_layouts
from onward.simulate.step import StepEstimate, estimate
from onward.simulate.transformer import PRESETS, Transformer

__all__ = [
    "PRESETS",
    "Cluster",
    "MeshLayout",
    "StepEstimate",
    "Transformer",
    "best_layouts",
    "built_in",
    "estimate",
    "read_cluster",
]
