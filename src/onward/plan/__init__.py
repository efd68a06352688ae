"""Specialized graph -> Plan: kernels, order of launches, lifetimes, offsets in memory, peak.

In: a specialized graph and a target. Out: a `Plan`, or OnwardError for an op without a kernel.
Imports: rewrite, kernels and graph.
"""

from onward.plan.budget import Budget
from onward.plan.fusible import Fusible
from onward.plan.offloaded import offloaded_operands, part_ranges
from onward.plan.plan import Buffer, MemoryRegion, Plan, PlannedLaunch
from onward.plan.planner import make_plan
from onward.plan.recompute import Search
from onward.plan.sequence import collectives, sequence_hash, sequence_text
from onward.plan.spec import conform_plan
from onward.plan.views import Layout

__all__ = [
    "Budget",
    "Buffer",
    "Fusible",
    "Layout",
    "MemoryRegion",
    "Plan",
    "PlannedLaunch",
    "Search",
    "collectives",
    "conform_plan",
    "make_plan",
    "offloaded_operands",
    "part_ranges",
    "sequence_hash",
    "sequence_text",
]
