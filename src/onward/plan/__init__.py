"""Bound graph -> Plan: kernels, order, lifetimes, in-place rights, offsets, predicted peak."""

from onward.plan.bind import bind
from onward.plan.budget import Budget
from onward.plan.fusible import Fusible
from onward.plan.plan import Buffer, Launch, Plan, Region
from onward.plan.planner import make_plan
from onward.plan.recompute import Search
from onward.plan.views import Layout

__all__ = [
    "Budget",
    "Buffer",
    "Fusible",
    "Launch",
    "Layout",
    "Plan",
    "Region",
    "Search",
    "bind",
    "make_plan",
]
