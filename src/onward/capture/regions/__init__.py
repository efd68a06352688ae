"""Regions: parts of a model that no graph has a form of, and that run in PyTorch within the plan.

In: a model whose capture was refused, and why. Out: submodules and operators that are one op each
in the export, `onward::region`. Imports: `model_state`, `held_sizes`.

A submodule whose code cannot be traced is one op in the export; an operator without a translation
is one by itself. The rest of the model is a graph, forward and backward.
"""

from onward.capture.regions.region import CapturedRegion, operator_region
from onward.capture.regions.search import RegionSearch

__all__ = ["CapturedRegion", "RegionSearch", "operator_region"]
