"""Regions: submodules and operators that cannot be captured, and run in PyTorch within a plan.

In: a model whose capture was refused, and the error. Out: `CapturedRegion`s, each one op
`onward::region` in the export. Imports: `model_state`, `held_sizes`.

A submodule whose code cannot be traced becomes one op, and so does an operator without a
translation. The rest of the model is a graph, forward and backward.
"""

from onward.capture.regions.region import CapturedRegion, operator_region
from onward.capture.regions.search import RegionSearch

__all__ = ["CapturedRegion", "RegionSearch", "operator_region"]
