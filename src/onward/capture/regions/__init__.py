"""Regions: parts of a model that no graph has a form of, and that run in PyTorch within the plan.

A submodule whose code cannot be traced is one op in the export; an operator without a translation
is one by itself. The rest of the model is a graph, forward and backward.
"""

from onward.capture.regions.chosen import Regions
from onward.capture.regions.region import Region, operator_region

__all__ = ["Region", "Regions", "operator_region"]
